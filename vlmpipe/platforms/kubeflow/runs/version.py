"""Check whether a Kubeflow Pipelines is new enough for a compiled pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ConfigError, os_errors

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi

Version = tuple[int, int]
MIN_VERSION: Version = (2, 14)  # OneOf, exit handlers and the placeholder of the run's name
# Before, a loop inside an exit handler fails (kubeflow/pipelines 12390), or never reports its end to it (13321). Ours
# are the variants of a sweep and the shares of data.tasks.
MIN_VERSION_OF_LOOPS: Version = (2, 17)
LOOP = b"parameterIterator"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+(?:-rc\.?\d+)?")  # tags of vendors count otherwise


def require_version(api: KubeflowApi, package: Path) -> str:
    """A sentence where the service's version is not known and matters, else "".

    Args:
        package: the compiled pipeline.

    Raises ConfigError where the version is too old.
    """
    with os_errors(f"reading {package}"):
        has_loop = LOOP in package.read_bytes()
    needed = MIN_VERSION_OF_LOOPS if has_loop else MIN_VERSION
    why = "the loop of a sweep or of data.tasks inside its exit handler" if has_loop else "the compiled file"
    tag = service_version(api)
    match = _RELEASE.fullmatch(tag)
    if match is None:
        version = f"calls its version {tag!r}" if tag else "does not tell its version"
        return f"{api.endpoint} {version}: {why} needs Kubeflow Pipelines {_text(needed)} or newer" if has_loop else ""
    if (int(match[1]), int(match[2])) < needed:
        raise ConfigError(
            f"{api.endpoint} is Kubeflow Pipelines {tag}",
            expected=f"{_text(needed)} or newer, for {why}",
            fix="upgrade Kubeflow Pipelines" + (", or run without a sweep and with data.tasks=1" if has_loop else ""),
        )
    return ""


def service_version(api: KubeflowApi) -> str:
    """The tag of the API server, such as 2.17.0; "" where it tells none.

    It is in the answer of healthz, but not in the type that kfp's client has for that.
    """
    with api.translated("ask for the version of"):
        answer = api.client.healthz_text()
    try:
        content = json.loads(answer)
    except ValueError:
        return ""
    tag = content.get("tag_name") if isinstance(content, dict) else None
    return tag[:100] if isinstance(tag, str) else ""


def _text(version: Version) -> str:
    return ".".join(map(str, version))
