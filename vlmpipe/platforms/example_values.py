"""The shipped run files' values, which a run cannot use: compiling needs neither data nor an existing project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

EXAMPLE_PROJECT = "example-project"
EXAMPLE_DIGEST = re.compile(r"@sha256:0{60}")  # of the shipped run files


def example_images(config: RunConfig) -> Iterator[Problem]:
    """The images that a run elsewhere could not pull."""
    images = {"cluster.image_uri": config.cluster.image_uri, "gcp.pipeline_image": config.gcp.pipeline_image}
    for field, image in images.items():
        if EXAMPLE_DIGEST.search(image):
            yield Problem(field, "found the digest of an example; expected an image of make build, by its digest")
