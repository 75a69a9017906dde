"""The text of a checkpoint's `COMMIT`: its place in training, and the settings and model that it is of.

`vlmpipe.trainer.checkpoint.commit` adds the checksum and the signature, and decides what counts as damage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pydantic import JsonValue, TypeAdapter, ValidationError

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.validations import Validations

FORMAT_VERSION = 4


@dataclass(frozen=True)
class CommitRecord:
    """Content of COMMIT. Sequences are counted over all ranks since the start of training."""

    attempt: int  # start of the training job that saved it
    epoch: int
    step: int
    sequences_consumed: int
    world_size: int
    num_nodes: int
    strategy: str
    checkpoint_format: str  # dcp, or of a program of one's own
    plan_sha256: str
    model_sha256: str  # of the model section of the run file
    tower_sha256: str  # of the frozen tower's weights, "" when any of them is trained
    versions: Mapping[str, str]
    frozen_sha256: str = ""  # of all other frozen weights, "" when there are none
    loss: float | None = None  # of the last step
    settings: Mapping[str, JsonValue] = field(default_factory=dict)  # see vlmpipe.trainer.checkpoint.resume_rules
    degrees: tuple[int, int, int] = (1, 1, 1)  # of tensor, pipeline and context parallelism
    total_steps: int = 0  # of the whole training, by the settings that saved
    learning_rate: float | None = None  # that the next step would have had, of parameters without a rate of their own
    validations: Validations | None = None  # before this save; of its own step where that was validated first
    manifests: Mapping[str, int] = field(default_factory=dict)  # name -> CRC32C
    manifests_sha256: Mapping[str, str] = field(default_factory=dict)  # name -> SHA-256, where there is a key
    format_version: int = FORMAT_VERSION

    def text(self) -> bytes:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self)).encode()


_FORM = TypeAdapter(CommitRecord)


def parse_commit(text: bytes, checkpoint: str) -> CommitRecord:
    """Return the record that `text` holds; a field that this version does not know is left out.

    The text is as it was written, by its checksum. So ConfigError, not damage, for that of another version: a
    checkpoint that were passed over could be deleted by a later save. ValueError for the text of no version.
    """
    content = json.loads(text)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version is None:
        raise ValueError("it has no format_version")
    if version != FORMAT_VERSION:
        raise _of_another_version(
            f"checkpoint {checkpoint} has format version {version}, this program reads {FORMAT_VERSION}"
        )
    try:
        return _FORM.validate_json(text, strict=True)
    except ValidationError as error:
        if any(wrong["type"] == "missing" and len(wrong["loc"]) == 1 for wrong in error.errors()):
            raise
        fields = ", ".join(".".join(map(str, wrong["loc"])) for wrong in error.errors())
        raise _of_another_version(
            f"COMMIT of checkpoint {checkpoint} is not of this version of vlmpipe, by {fields}"
        ) from error


def _of_another_version(problem: str) -> ConfigError:
    return ConfigError(
        problem,
        expected="checkpoints of this version of vlmpipe",
        fix="continue the run with the version that saved it, or start a new run",
    )
