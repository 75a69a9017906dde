"""Step: replaces the cache_features job when there is nothing to encode."""


def reuse_features(run_uri: str, features: str) -> str:
    """Record why no features are encoded.

    Args:
        run_uri: The run's folder.
        features: reuse (all images have features) or off (no cache).
    """
    from vlmpipe.components.runtime.prepared_data import why_nothing_is_encoded
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "cache-features") as progress:
        progress.finish("reused" if features == "reuse" else "done", why_nothing_is_encoded(run_uri, features))
    return run_uri
