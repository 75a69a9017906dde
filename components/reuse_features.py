"""Step: replaces the cache_features job when there is nothing to encode."""


def reuse_features(run_uri: str, features: str) -> str:
    """Record why no features are encoded.

    Args:
        run_uri: The run's folder.
        features: reuse (all images have features) or off (no cache).
    """
    from vlmpipe.components.runtime.step_context import step_context

    with step_context(run_uri, "cache-features") as progress:
        reasons = {"reuse": "every image has features already", "off": "no cache: images are encoded while training"}
        progress.finish("reused" if features == "reuse" else "done", reasons[features])
    return run_uri
