"""Labels as both Vertex AI and Kubernetes take them.

Vertex AI: at most 64 of a resource; lower-case letters, digits, dashes and underscores (CustomJob.labels, v1), at most
63 characters, a key begins with a letter (Google Cloud's page on labels). Kubernetes: letters of ASCII alone, and a
letter or digit at both ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from vlmpipe.config.service_forms import LABEL_CHARS as MAX_CHARS
from vlmpipe.config.service_forms import LABELS_OF_A_RESOURCE as OF_A_RESOURCE
from vlmpipe.config.service_forms import RESERVED_LABELS, unreserved
from vlmpipe.trainer.errors import ConfigError

# Beside a run's own: step, submission, schedule and digest of ours, and Vertex AI's billing id of the pipeline's run.
ADDED = 5
MAX_LABELS = OF_A_RESOURCE - ADDED
LabelKey = Annotated[
    str, Field(pattern=rf"^[a-z]([a-z0-9_-]{{0,{MAX_CHARS - 2}}}[a-z0-9])?$"), AfterValidator(unreserved)
]
LabelValue = Annotated[str, Field(pattern=rf"^([a-z0-9]([a-z0-9_-]{{0,{MAX_CHARS - 2}}}[a-z0-9])?)?$")]
_OF_VERTEX = re.compile(rf"[\w-]{{0,{MAX_CHARS}}}")


def require_labels(labels: Mapping[str, str]) -> None:
    """Raise ConfigError for labels that Vertex AI refuses, whose letters may be of any script."""
    wrong = [
        f"{key}={value}"
        for key, value in labels.items()
        if not key[:1].isalpha()
        or key.startswith(RESERVED_LABELS)
        or not all(_OF_VERTEX.fullmatch(text) and text == text.lower() for text in (key, value))
    ]
    if wrong:
        raise ConfigError(
            f"labels: {', '.join(wrong)}",
            expected=f"lower-case letters, digits, dashes and underscores, at most {MAX_CHARS} in name and value; a "
            f"name begins with a letter, and not with {RESERVED_LABELS[0]}",
        )
    if len(labels) > OF_A_RESOURCE:
        raise ConfigError(f"labels: {len(labels)} are given", expected=f"at most {OF_A_RESOURCE} of a job")
