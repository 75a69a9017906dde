"""A look at a source's first samples without a tokenizer: form, marks, files and a few pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.coverage import Coverage
from vlmpipe.trainer.data.prepare.checks import check_clip, check_image, check_turns
from vlmpipe.trainer.data.rejects import Reject, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Sample
from vlmpipe.trainer.errors import DataError, ExitCode

SAMPLES = 200
DECODED = 16  # images; of the others the file is looked for
LARGEST_READ_BYTES = 8 << 20


@dataclass
class Look:
    """What was found in the first samples."""

    coverage: Coverage = field(default_factory=Coverage)
    read: int = 0
    bad: list[Reject] = field(default_factory=list)
    is_part: bool = False  # there are further samples

    def verdict(self, data: DataConfig) -> tuple[Literal["ok", "warning", "failed"], str, int]:
        """How it looks, a sentence for people, and the exit code of a failure."""
        if not self.read:
            return "failed", f"{data.source} holds no samples", ExitCode.DATA
        try:
            self.coverage.check(data.source)
        except DataError as error:
            return "failed", error.text(), int(error.code)
        of = f"{'the first ' if self.is_part else ''}{self.read:,} samples of {data.source}"
        if self.bad:
            text = f"{len(self.bad):,} of {of} are bad, for example: {self.bad[0].sentence()}"
            too_many = not self.is_part and len(self.bad) > data.max_reject_fraction * self.read
            if too_many or len(self.bad) == self.read:
                return "failed", text, ExitCode.DATA
            return "warning", text, ExitCode.OK
        text = f"{of} can be read: {self.coverage.described()}"
        if data.image_folder and not self.coverage.images:
            return "warning", f"{text}; data.image_folder is given, and none of these names an image", ExitCode.OK
        return "ok", text, ExitCode.OK


def look_at(source: Iterable[Sample | Reject], config: DataConfig) -> Look:
    """Look at the first samples, or those of `data.max_samples`. Raises what reading the source raises."""
    look, decoded = Look(), 0
    most = min(SAMPLES, config.max_samples or SAMPLES)
    for record in islice(source, most + 1):
        if look.read == most:
            look.is_part = most == SAMPLES
            break
        look.read += 1
        if isinstance(record, Reject):
            look.bad.append(record)
            continue
        look.coverage.add(record)
        try:
            check_turns(record.turns, len(record.images), ())
            for image in record.images:
                decoded += _seen(image, config, decode=decoded < DECODED)
        except RejectedError as error:
            look.bad.append(Reject(record.where, record.id, error.code, str(error)))
    return look


def _seen(image: ImageRef, config: DataConfig, *, decode: bool) -> bool:
    """Whether the image was decoded. Raises RejectedError."""
    size_bytes = image.size_bytes() if image.size_bytes else 1
    if size_bytes and (not decode or size_bytes > LARGEST_READ_BYTES):
        return False
    data = image.read()
    if image.clip:
        check_clip(data, image.clip, config)
    else:
        check_image(data, config, name=image.name)
    return True
