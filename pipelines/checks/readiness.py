"""Missing requirements of a compiled pipeline's run: compiling needs neither data nor an existing project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.target_requirements import require_reached_files
from vlmpipe.config.validation_errors import Problem, RunFileError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.pipelines.targets import TargetName

EXAMPLE_PROJECT = "example-project"
EXAMPLE_DIGEST = re.compile(r"@sha256:0{60}")  # of the shipped run files


def unready(config: RunConfig, target: TargetName) -> Iterator[Problem]:
    """The fields that a run there could not use: files of this machine, and the shipped examples' values."""
    if target == "local":
        return
    try:
        require_reached_files(config, target=target)
    except RunFileError as error:
        yield from error.problems
    if target == "vertex" and config.gcp.project == EXAMPLE_PROJECT:
        yield Problem("gcp.project", f"found {EXAMPLE_PROJECT}, the shipped example's; expected your project")
    images = {"cluster.image_uri": config.cluster.image_uri, "gcp.pipeline_image": config.gcp.pipeline_image}
    for field, image in images.items():
        if EXAMPLE_DIGEST.search(image):
            yield Problem(field, "found the digest of an example; expected an image of make build, by its digest")
