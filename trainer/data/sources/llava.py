"""LLaVA's format: a JSON array or JSON lines of conversations about images in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, starmap
from typing import BinaryIO, Protocol, runtime_checkable

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.layouts import address_of, as_llava, media_values, require_same
from vlmpipe.trainer.data.conversations.message_parts import GEMINI, MARKS, as_messages, kind_of, named_in
from vlmpipe.trainer.data.conversations.records import SHAPES, identity_of, listed, with_media
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Sample, stable_digest
from vlmpipe.trainer.data.sources.base import FileSource
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, open_json, parse_json
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.storage.regular_files import open_regular

FORMAT_PROBE_RECORDS = 20  # if none of the first ones is a conversation, the file has another format
LONGEST_LINE_BYTES = 64 << 20
EXAMPLE = """[{"id": "1", "image": "cats/1.jpg", "conversations": [
  {"from": "human", "value": "<image>\\nWhat is this?"},
  {"from": "gpt", "value": "A cat."}]}]"""


@runtime_checkable
class VideoReader(Protocol):
    """A feature that makes one image of a whole video: a hook beside those of its base, for sources."""

    def image_of_video(self, files: ImageFiles, path: str, data: DataConfig) -> ImageRef:
        """The video at a path of a record. Raises RejectedError."""
        ...


class LlavaSource(FileSource[object, object]):
    """Samples of `.json` or `.jsonl` files, read one by one."""

    format = "llava"

    def __init__(self, files: Files, config: DataConfig) -> None:
        super().__init__(files, config)
        self._reader = next((reader for reader in features_of(config, "data") if isinstance(reader, VideoReader)), None)
        for name in files.names:
            self._require_conversations(name)

    def read(self, name: str) -> Iterator[Sample | Reject]:
        return starmap(self.checked, self._records(name))

    def _records(self, name: str) -> Iterator[tuple[str, object]]:
        """Parsed records; a Reject in place of a line that is not JSON."""
        path = self.files.path(name)
        if name.endswith(".jsonl"):
            with os_errors(f"reading {path}"), open_regular(path) as file:
                yield from _lines(name, file)
        else:
            with open_json(path, f"one JSON array of LLaVA records, like\n{EXAMPLE}") as reader:
                for number, record in enumerate(reader.items(), 1):
                    yield f"{name} record {number}", record
                reader.end()

    def named(self, record: object) -> object:
        return self.renamed(record)

    def sample(self, where: str, record: object) -> Sample:
        if not isinstance(record, Record):
            raise RejectedError(RejectCode.RECORD_FORM, f"the record is {kind_of(record)}, not an object")
        identity = identity_of(record) or stable_digest(record)[:16]
        record = as_llava(as_messages(record))
        files = {kind: [address_of(value, kind) for value in media_values(record, kind)] for kind in MARKS}
        named = list(named_in(listed(record, "messages"))) if record.has("messages") else []
        if any(files.values()):
            require_same(files, named)
        else:
            for kind, address in named:
                files[kind].append(address)
        images = tuple(map(self.image_files.named, files["image"]))
        videos = [self._shown(path) for path in files["video"]]
        frames = zip(files["video"], map(len, videos), strict=True)
        times_s = [self.image_files.frame_times_s(*frame) for frame in frames] if self.config.video_times else []
        made = self.build(record, images, where, identity, videos=len(videos))
        turns, images = with_media(made.turns, images, videos, times_s)
        return replace(made, turns=turns, images=images)

    def _shown(self, path: str) -> list[ImageRef]:
        """Return a video for the model: all of it, or images of its frames."""
        if self._reader:
            return [self._reader.image_of_video(self.image_files, path, self.config)]
        return self.image_files.video_frames(path, self.config.video_frames, self.config.video_fps)

    def _require_conversations(self, name: str) -> None:
        """Report a whole file of another format once instead of rejecting each record."""
        path = self.files.path(name)
        first = [record for _, record in islice(self._records(name), FORMAT_PROBE_RECORDS)]
        if not first:
            raise DataError(f"{path} holds no records", expected=f"LLaVA records, like\n{EXAMPLE}")
        known = {*SHAPES, GEMINI, *self.config.columns.named().values()}
        if any(isinstance(record, dict) and known & record.keys() for record in first):
            return
        first_record = first[0]
        if isinstance(first_record, Reject):
            what = first_record.message
        elif isinstance(first_record, dict):
            what = "an object with the keys " + (", ".join(map(repr, list(first_record)[:8])) or "none")
        else:
            what = kind_of(first_record)
        raise DataError(
            f"{path} is not in LLaVA's format: found {what}",
            expected=f"records with the keys 'id', 'image' and 'conversations', like\n{EXAMPLE}",
            fix="convert the file, or yield its records from a function; vlmpipe docs data-formats describes both",
        )


def _lost(name: str, number: int, how: str) -> DataError:
    return DataError(
        f"{name} is cut or damaged: line {number:,} {how}; it is unknown how many samples are lost",
        expected="a whole file of JSON lines",
        fix="fetch or write the file again, or complete its last line",
    )


def _lines(name: str, file: BinaryIO) -> Iterator[tuple[str, object]]:
    number = 0
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        where = f"{name} line {number}"
        if len(line) > LONGEST_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE_BYTES)
            yield where, Reject(where, "", RejectCode.RECORD_PARSE, f"more than {LONGEST_LINE_BYTES} bytes")
            continue
        if b"\0" in line:
            raise _lost(name, number, "has bytes of zero, as blanked parts of a file have")
        try:
            content = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if content:
                yield where, parse_json(content)
        except UnicodeDecodeError as error:
            if not line.endswith(b"\n"):
                raise _lost(name, number, "is the last one, has no line end and is not whole") from error
            yield where, Reject(where, "", RejectCode.RECORD_ENCODING, f"not UTF-8: {error}")
        except BadJsonError as error:
            if not line.endswith(b"\n"):
                raise _lost(name, number, f"is the last one, has no line end and is not JSON ({error})") from error
            yield where, Reject(where, "", RejectCode.RECORD_PARSE, f"not JSON: {error}")
