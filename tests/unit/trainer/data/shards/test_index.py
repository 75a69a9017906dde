"""The mapped index: its columns are the lines', damage ends in an error, and memory does not grow with the samples."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data.index import lines_of, sort_lines, write_index
from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prefixes.prefix import NO_KEY
from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.index_file import NAME, IndexFileWriter, open_index, read_columns, schema_of
from vlmpipe.trainer.data.shards.index_lines import (
    LINES,
    PAIR_COLUMNS,
    PREFIX_COLUMNS,
    SCHEMA,
    VIDEO_COLUMNS,
    WITH_VIDEOS,
    IndexLines,
)
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.sizing.image_grids import VideoSize


def line(identity: str, images: int, **videos: Any) -> dict[str, Any]:
    (made,) = lines_of({identity: [f"{identity} {number}" for number in range(images)]}, "train")
    return made | {"image_widths": [8] * images, "image_heights": [6] * images} | videos


def written(folder: Path, *lines: dict[str, Any]) -> SplitIndex:
    """By way of a chunk for each line, as several sources have."""
    for number, one in enumerate(lines):
        (folder / str(number)).mkdir()
        chunk = IndexLines()
        chunk.add(**one)
        chunk.write_lines(folder / str(number))
    sort_lines(folder, [folder / str(number) for number in range(len(lines))])
    return SplitIndex("train", open_index(folder / NAME)["train"])


def test_videos_have_their_length_and_count_by_patches(tmp_path: Path) -> None:
    videos = dict(zip(VIDEO_COLUMNS, ([0, 3, 1], [0.0, 0.7, 2.0]), strict=True))
    split = written(tmp_path, line("a", 2), line("b", 3, **videos), line("c", 0))
    assert split.has_videos and pa.ipc.open_file(str(tmp_path / NAME)).schema == schema_of(with_videos=True)
    assert pq.read_schema(tmp_path / "1" / LINES) == WITH_VIDEOS
    assert split.shown().tolist() == [2, 5, 0]
    assert split.image_places(np.arange(5))[:, 3].tolist() == [0, 0, 0, 1, 1]
    still, *moving = split.image_sizes(1)
    assert not isinstance(still, VideoSize) and split.image_sizes(0) == [(8, 6), (8, 6)]
    assert [(*one, one.patches, one.patch_s) for one in moving if isinstance(one, VideoSize)] == [
        (8, 6, 3, 0.7),
        (8, 6, 1, 2.0),
    ]


def test_prefixes_are_columns_of_data_that_was_prepared_with_them(tmp_path: Path) -> None:
    keys = {"a": ("ab" * 16, 7), "b": ("cd" * 16, 3), "c": (NO_KEY, 0), "d": ("ab" * 16, 7), "e": (NO_KEY, 0)}
    lines = [line(name, 1) | dict(zip(PREFIX_COLUMNS, (n, key), strict=True)) for name, (key, n) in keys.items()]
    split = written(tmp_path, *lines)
    schema = schema_of(with_videos=False, with_prefixes=True)
    assert pa.ipc.open_file(str(tmp_path / NAME)).schema == schema
    assert split.prefix_tokens.tolist() == [7, 3, 0, 7, 0]
    group = split.prefix_groups(0).group.tolist()
    assert group[0] == group[3] and len({group[0], group[1], group[2], group[4]}) == 4


def test_pairs_of_such_data_have_the_tokens_that_their_conversations_share(tmp_path: Path) -> None:
    names = (*PREFIX_COLUMNS, *PAIR_COLUMNS)
    values = {"a": (3, "ab" * 16, 7), "b": (0, NO_KEY, 0)}
    split = written(tmp_path, *(line(name, 1) | dict(zip(names, of, strict=True)) for name, of in values.items()))
    schema = schema_of(with_videos=False, with_prefixes=True, with_pairs=True)
    assert pa.ipc.open_file(str(tmp_path / NAME)).schema == schema
    assert split.prefix_tokens.tolist() == [3, 0] and split.pair_prefix_tokens.tolist() == [7, 0]


def test_data_without_prefixes_is_refused_where_they_are_shared(tmp_path: Path) -> None:
    split = written(tmp_path, line("a", 1))
    assert not split.has_prefixes
    with pytest.raises(DataError, match="does not say which tokens samples share") as caught:
        split.prefix_groups(0)
    assert "share_prefix off" in caught.value.fix


def test_an_index_without_videos_lacks_their_columns(tmp_path: Path) -> None:
    split = written(tmp_path, line("a", 2), line("b", 1))
    assert not split.has_videos and pa.ipc.open_file(str(tmp_path / NAME)).schema == schema_of(with_videos=False)
    assert pq.read_schema(tmp_path / "0" / LINES) == SCHEMA
    assert split.shown().tolist() == [2, 1]


def test_samples_are_found_by_their_ids(tmp_path: Path) -> None:
    identities = ["", "a", "a/b", "a0", "b", "z", "\u00e9", "\U0001f600", "\uffff"]
    folder = write_index(tmp_path / "set", {one: [] for one in identities})
    split = Index.load(str(folder)).split("eval")
    assert list(split.ids) == sorted(identities) == split.ids[:] == [split.ids[n] for n in range(len(split))]
    for identity in (*identities, "0", "ab", "zz", "\U0001f601"):
        expected = sorted(identities).index(identity) if identity in identities else None
        assert split.number(identity) == expected and (identity in split.ids) == (expected is not None)
    assert split.ids[-1] == sorted(identities)[-1]
    with pytest.raises(IndexError):
        split.ids[len(identities)]


# ---- damage


MANY = {f"sample-{number:03}": [f"{number}-{image}" for image in range(number % 4)] for number in range(60)}


def places_of(path: Path) -> Iterator[tuple[str, int]]:
    """A byte in the middle of each buffer of a column, by its place in the file."""
    with pa.memory_map(str(path)) as mapped:
        start = mapped.read_buffer().address
        train = pa.ipc.open_file(mapped).get_batch(1)  # of the same mapping
        for name, column in zip(train.schema.names, train.columns, strict=True):
            indices = column.indices if isinstance(column, pa.DictionaryArray) else column
            for buffer in filter(None, indices.buffers()):
                yield name, buffer.address - start + buffer.size // 2


def test_a_flipped_byte_in_each_column_is_reported(tmp_path: Path) -> None:
    folder = write_index(tmp_path / "set", MANY, "train")
    whole, met = (folder / NAME).read_bytes(), set()
    for name, place in places_of(folder / NAME):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        (folder / NAME).write_bytes(damaged)
        with pytest.raises(DataError, match=r"index\.arrow is damaged: its checksum"):
            Index.load(str(folder))
        met.add(name)
    assert met == set(schema_of(with_videos=False).names)


def read_everything(path: Path) -> None:
    """All that users of the index read, of a file that no checksum was compared with."""
    for name, columns in open_index(path).items():
        split = SplitIndex(name, columns)
        index = Index("", {"train": split, "eval": split})
        for use in (
            lambda split=split: [len(text) for text in split.ids],
            lambda split=split: split.tokens_with(1),
            lambda split=split: split.shown(),
            lambda split=split: split.stored_order(),
            lambda index=index: list(index.unique_images().items()),
        ):
            with suppress(DataError, ValueError, IndexError):
                use()
        for number in range(len(split)):
            for of_sample in (split.sample_location, split.image_sizes, split.image_sha256, split.key):
                with suppress(DataError):
                    of_sample(number)


def read_damaged(path: Path, seed: int, times: int) -> None:
    """Read the file with `times` kinds of damage."""
    whole, draw = path.read_bytes(), random.Random(seed)
    for _ in range(times):
        damaged, place = bytearray(whole), draw.randrange(len(whole) - 8)
        if draw.random() < 0.5:
            damaged[place : place + 8] = draw.choice([2**63 - 1, 2**31, 10**12, -1]).to_bytes(8, "little", signed=True)
        else:
            damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with suppress(DataError, pa.ArrowException, ValueError):
            read_everything(path)
            for _ in read_columns(path, schema_of(with_videos=False).names):
                pass


def test_no_damage_ends_the_interpreter(tmp_path: Path) -> None:
    """Even where nothing compares a checksum: a file may be changed after it was checked."""
    folder = write_index(tmp_path / "set", MANY, "train")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.unit.trainer.data.shards import test_index as test\n"
         f"test.read_damaged(test.Path({str(folder / NAME)!r}), 5, {2000 if WHOLE else 60}); print('done')"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


# ---- memory


SAMPLES = 50_000


def many_lines(samples: int) -> pa.Table:
    (line,) = lines_of({"": ["x"]}, "train")
    ids = [f"sample-{number:09}" for number in range(samples)]
    return pa.table(
        [pa.array(ids if field.name == "id" else [line[field.name]] * samples, field.type) for field in SCHEMA], SCHEMA
    )


def test_an_open_index_has_no_object_and_no_private_memory_for_each_sample(tmp_path: Path) -> None:
    """Four bytes of a sample are its number of images, which the sampler takes."""
    shards: dict[Split, list[str]] = {"train": ["shard"], "eval": []}
    with IndexFileWriter(tmp_path, shards) as index:
        index.add(many_lines(SAMPLES))
    data = DataConfig(source="unused.json", sequence_length=64, max_images_per_sequence=4)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    split = SplitIndex("train", open_index(tmp_path / NAME)["train"])
    sampler = PackedBatchSampler(split, data, seed=0, global_batch_size=4)
    assert split.shard_numbers[-1] == 0 and split.ids[SAMPLES - 1] == f"sample-{SAMPLES - 1:09}"
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 * SAMPLES + 60_000 and len(gc.get_objects()) - objects < 2_000
    assert len(sampler.tokens) == SAMPLES


def test_the_writers_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    peaks = []
    for times in (1, 8):
        (tmp_path / str(times)).mkdir()
        before = pa.total_allocated_bytes()
        with IndexFileWriter(tmp_path / str(times), {"train": ["shard"], "eval": []}) as index:
            for _ in range(times):
                index.add(many_lines(2_000))
            peaks.append(pa.total_allocated_bytes() - before)
        assert len(open_index(tmp_path / str(times) / NAME)["train"]) == times * 2_000
    assert peaks[1] <= peaks[0] + 100_000


def test_opening_imports_no_pandas(tmp_path: Path) -> None:
    """Each rank would take a second and 22 MiB for it."""
    folder = write_index(tmp_path / "set", MANY, "train")
    code = (
        "import sys; from vlmpipe.trainer.data.shards.index import Index; "
        "split = Index.load(sys.argv[1]).split('train'); "
        "split.image_count, split.shards, split.sample_location(0); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
