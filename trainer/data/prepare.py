"""Data preparation: a source becomes checked, tokenized, sharded data, addressed by its content.

Samples are read once to check, count and store them, and once before that where a tokenizer is to be trained on their
texts. What grows with the data is kept on disk: memory does not. All is built in a scratch folder and uploaded when it
is complete and good enough; DONE comes last, so what lacks it does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import JobConfig
from trainer.data.contact_sheet import ContactSheet
from trainer.data.conversation import make_tokenizer, training_texts
from trainer.data.examine import Accepted, Examination, final_split, image_tokens_of, with_unique_ids
from trainer.data.index import IndexWriter
from trainer.data.rejects import Ledger, Reject, RejectCode
from trainer.data.samples import SPLITS, Sample, Split, Turn
from trainer.data.shards import ShardWriter, key_of, sample_json
from trainer.data.sources import Source, open_source
from trainer.data.stats import Counts, describe, sample_digest
from trainer.data.thumbnails import write_reject_pictures
from trainer.errors import DataError, os_errors
from trainer.progress import Progress
from trainer.storage import AlreadyExistsError, Storage, join_uri, open_storage

FORMAT_VERSION = 2  # raise it when the same input gives other bytes
DONE = "DONE"
# The source describes itself by content, not by its path; the others say how the data is read.
NOT_IN_FINGERPRINT = {"source", "image_folder", "pack", "shuffle_shards", "shard_cache_gib"}
PROBE_SIZES = ((64, 64), (640, 480), (480, 640), (1024, 1024))  # pixels; tell image token rules apart
MAX_THREADS = 32

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies and what it holds."""

    uri: str
    fingerprint: str
    reused: bool
    counts: dict[str, int]  # read, accepted, rejected, repaired, and samples of each split


def prepare(config: JobConfig, progress: Progress) -> Prepared:
    """Prepare the run's data under `<root>/prepared/<fingerprint>`, or find it there.

    Raises DataError (exit 65) when more samples than `data.max_reject_fraction` are bad or a split is empty, and what
    `open_source` raises. Nothing is stored unless all went well.
    """
    source = open_source(config.data)
    identity = _fingerprint(config, source)
    uri = join_uri(config.run.prepared_root, identity)
    storage = open_storage(uri)
    counts = _done_counts(storage)
    if counts is not None:
        return Prepared(uri, identity, True, counts)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-prepare-") as scratch, os_errors(f"preparing data in {scratch}"):
        counts = _build(config, source, Path(scratch), progress)
        _publish(storage, Path(scratch), identity, counts)
    return Prepared(uri, identity, False, counts)


def fingerprint(config: JobConfig) -> str:
    """Name of the prepared data of this run: 32 hexadecimal digits that change when its bytes would."""
    return _fingerprint(config, open_source(config.data))


def _fingerprint(config: JobConfig, source: Source) -> str:
    image_tokens = image_tokens_of(config)
    tokenizer = Path(config.model.tokenizer)
    files = sorted(path for path in tokenizer.glob("*.json")) if tokenizer.is_dir() else []
    settings = {
        "format": FORMAT_VERSION,
        "source": source.fingerprint(),
        "data": config.data.model_dump(exclude=NOT_IN_FINGERPRINT),
        "tokenizer": config.model.tokenizer,
        "tokenizer_files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "image_tokens": [image_tokens(*size) for size in PROBE_SIZES],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _done_counts(storage: Storage) -> dict[str, int] | None:
    """Counts of prepared data that is there and whole. A DONE whose files are gone is removed: all is made anew."""
    if storage.stat(DONE) is None:
        return None
    done = json.loads(storage.read(DONE))
    found = {info.name: info.size_bytes for info in storage.list()}
    if all(found.get(name) == size_bytes for name, size_bytes in done["files"].items()):
        return dict(done["counts"])
    storage.delete(DONE)
    return None


def _build(config: JobConfig, source: Source, folder: Path, progress: Progress) -> dict[str, int]:
    """Write everything but DONE into `folder`. Returns the counts."""
    limit = config.data.max_samples or None
    tokenizer, total = _tokenizer(config, source, progress)
    tokenizer.save_pretrained(folder / "tokenizer")

    examine = Examination(config, tokenizer)
    writers = {split: ShardWriter(folder, split, config.data.shard_samples) for split in SPLITS}
    index, counts, sheet = IndexWriter(), Counts(), ContactSheet()
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "prepare") as pool, (folder / "rejects.jsonl").open("w") as lines:
        ledger = Ledger(config.data.max_reject_fraction, lines)
        entries = with_unique_ids(ledger.counting(islice(source, limit)), config.data.held_out_fraction)
        for result in _map_in_order(pool, examine, entries, ahead=4 * threads):
            if accepted := _counted(result, config, ledger, counts):
                sheet.add(accepted.id, accepted.split, accepted.turns, accepted.images)
                _store(accepted, writers[accepted.split], index)
            progress.update(ledger.read, total, unit="samples", message=f"{ledger.rejected} rejected")
    for writer in writers.values():
        writer.close()
    ledger.check()
    index.write(folder)
    sheet.write(folder)
    stats = describe(folder, counts, config.data)
    split_samples = {split: int(stats["splits"][split]["samples"]) for split in SPLITS}
    _check_splits(split_samples, config.data.held_out_fraction)

    summary = ledger.summary() | {
        "pictures": write_reject_pictures(ledger.examples, folder, config.data.max_image_pixels)
    }
    _write_json(folder / "rejects_summary.json", summary)
    _write_json(folder / "stats.json", stats)
    return {name: summary[name] for name in ("read", "accepted", "rejected", "repaired")} | split_samples


def _tokenizer(config: JobConfig, source: Source, progress: Progress) -> tuple[Any, int]:
    """The tokenizer, and how many records there are: 0, unknown, unless it was trained on their texts."""
    name, read = config.model.tokenizer, 0

    def turns() -> Iterator[Turn]:
        nonlocal read
        for sample in islice(source, config.data.max_samples or None):
            read += 1
            progress.update(read, unit="samples", message="reading texts")
            if isinstance(sample, Sample) and final_split(sample, config.data.held_out_fraction) == "train":
                yield from sample.turns

    return make_tokenizer(name, training_texts(turns())), read


def _counted(result: Accepted | Reject, config: JobConfig, ledger: Ledger, counts: Counts) -> Accepted | None:
    """Count one sample; returns it unless it is rejected, or a duplicate that is to be dropped."""
    if isinstance(result, Reject):
        ledger.reject(result)
        return None
    image_sha256 = [image.sha256 for image in result.images]
    content = sample_digest(result.turns, image_sha256)
    if config.data.duplicates == "drop" and content in counts.samples:
        counts.dropped += 1
        message = "the same images with the same text came before"
        ledger.reject(Reject(result.where, result.id, RejectCode.SAMPLE_DUPLICATE, message))
        return None
    ledger.accept(result.repairs)
    counts.add(result.split, result.turns, image_sha256, content)
    return result


def _store(sample: Accepted, writer: ShardWriter, index: IndexWriter) -> None:
    key = key_of(sample.id)
    members = writer.add(
        key, sample_json(sample.id, sample.turns), [(image.extension, image.data) for image in sample.images]
    )
    index.add(
        id=sample.id,
        key=key,
        split=sample.split,
        shard=members.shard,
        json_offset=members.json_offset,
        json_bytes=members.json_bytes,
        image_offsets=members.image_offsets,
        image_bytes=members.image_bytes,
        image_sha256=[image.sha256 for image in sample.images],
        image_widths=[image.width for image in sample.images],
        image_heights=[image.height for image in sample.images],
        image_token_counts=list(sample.image_token_counts),
        image_tokens=sum(sample.image_token_counts),
        tokens=len(sample.encoded.input_ids),
        label_tokens=sample.encoded.label_tokens,
        turns=len(sample.turns),
        slices=[turn.slice for turn in sample.turns],
    )


def _check_splits(samples: dict[Split, int], held_out_fraction: float) -> None:
    """Training needs samples; evaluation too, unless nothing was to be held out."""
    train, held_out = samples["train"], samples["eval"]
    if train and (held_out or not held_out_fraction):
        return
    raise DataError(
        f"{train} samples for training and {held_out} held out for evaluation",
        expected="at least one of each",
        fix="use more samples (data.max_samples) or another data.held_out_fraction",
    )


def _publish(storage: Storage, folder: Path, identity: str, counts: dict[str, int]) -> None:
    """Upload what was built, remove what an interrupted build may have left, and create DONE."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, path in paths.items():
        storage.upload(path, name)
    for info in storage.list():
        if info.name not in paths and info.name != DONE:
            storage.delete(info.name)
    files = {name: path.stat().st_size for name, path in paths.items()}
    done = {"format": FORMAT_VERSION, "fingerprint": identity, "counts": counts, "files": files}
    # Another run may have prepared the same data meanwhile; equal input gives equal bytes, so its DONE is as good.
    with suppress(AlreadyExistsError):
        storage.create(DONE, json.dumps(done, indent=1).encode())


def _map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int
) -> Iterator[R]:
    """`map` over a pool that holds at most `ahead` items, so that a large source never lies in memory."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) == ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
