"""Base class and common field types of the run file's sections."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[int, Field(gt=0)]
_BUCKET = re.compile(r"(gs|s3)://[a-z0-9][a-z0-9._-]*(/|$)")


def storage_uri(value: str) -> str:
    """Raise ValueError for what `open_storage` does not open."""
    if "://" in value and not value.startswith("file://") and not _BUCKET.match(value):
        raise ValueError("expected a local path, gs://bucket/path or s3://bucket/path")
    return value


StorageUri = Annotated[str, AfterValidator(storage_uri)]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
