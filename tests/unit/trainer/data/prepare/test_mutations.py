"""Damaged files of every format through preparation: it refuses in words or keeps the law, and never anything else.

`make fuzz-data N=1000` does it longer, with other damage each time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.data.formats import FORMATS, captioned, write_source
from tests.support.data.prepared import job_config, run_prepare
from tests.support.fuzz import examples, fuzzed
from tests.support.short_form import WHOLE, chosen
from tests.support.special_files import INSTEAD
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.errors import ExitCode, UserError

EXAMPLES = examples(300 if WHOLE else 50)
SAMPLES = 4


@dataclass(frozen=True)
class Damage:
    """One change to a file, at a place given as a share of its length."""

    kind: str
    place: float
    length: int
    byte: int

    def __call__(self, data: bytes) -> bytes:
        start = int(self.place * len(data))
        stop = min(len(data), start + self.length)
        return DAMAGES[self.kind](data, start, stop, self.byte)


DAMAGES: dict[str, Callable[[bytes, int, int, int], bytes]] = {
    "truncate": lambda data, start, stop, byte: data[:start],
    "cut to blocks": lambda data, start, stop, byte: data[: start // 512 * 512],
    "flip": lambda data, start, stop, byte: (
        data[:start] + bytes(b ^ (byte or 1) for b in data[start:stop]) + data[stop:]
    ),
    "blank": lambda data, start, stop, byte: data[:start] + bytes(stop - start) + data[stop:],
    "fill": lambda data, start, stop, byte: data[:start] + bytes([byte]) * (stop - start) + data[stop:],
    "remove": lambda data, start, stop, byte: data[:start] + data[stop:],
    "repeat": lambda data, start, stop, byte: data[:stop] + data[start:stop] + data[stop:],
    "swap": lambda data, start, stop, byte: (
        data[:start] + data[stop : 2 * stop - start] + data[start:stop] + data[2 * stop - start :]
    ),
    "append": lambda data, start, stop, byte: data + data[start:stop],
}

SPARSE_TAIL_BYTES = 3 << 29  # 1.5 GiB, of which the disk holds nothing
CONTAINERS_TAIL_BYTES = 192 << 20  # is read, piece by piece, and is longer than any line may be


def _sparse_tail(path: Path) -> None:
    tail_bytes = SPARSE_TAIL_BYTES if path.suffix == ".png" else CONTAINERS_TAIL_BYTES
    os.truncate(path, path.stat().st_size + tail_bytes)


SPECIAL_FILES = {**INSTEAD, "sparse tail": _sparse_tail}

REJECT_CODES = {"sparse tail": "image.too_large", "device": "ref.unsafe_path"}  # the others are ref.missing
READABLE = {
    ("llava-lines", "sparse tail"),  # one line is too long
    ("webdataset", "folder"),  # which is no file of the set, whatever its name
}

damages = st.builds(
    Damage,
    kind=st.sampled_from(sorted(DAMAGES)),
    place=st.floats(0, 1, exclude_max=True),
    length=st.sampled_from([1, 2, 8, 64, 512, 1500]),
    byte=st.integers(0, 255),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A small set in each format: its folder, and data.source relative to it."""
    found = {}
    for name in FORMATS:
        folder = tmp_path_factory.mktemp(name)
        found[name] = (folder, os.path.relpath(write_source(name, folder, captioned(SAMPLES)), folder))
    return found


@pytest.mark.timeout(60 + 3 * EXAMPLES)
@fuzzed(EXAMPLES)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    victims=st.lists(st.tuples(st.integers(0, 100), damages), min_size=1, max_size=3),
)
def test_damage_is_refused_or_counted(
    originals: dict[str, tuple[Path, str]],
    tmp_path: Path,
    name: str,
    victims: list[tuple[int, Damage]],
) -> None:
    original, relative = originals[name]
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    folder = Path(shutil.copytree(original, work / "set"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files += [path for path in files if path.suffix != ".png"] * 3  # containers, as often as pictures
    for number, damage in victims:
        path = files[number % len(files)]
        path.write_bytes(damage(path.read_bytes()))
    uri = prepare_or_refuse(work / "root", str(folder / relative))
    event("the law holds" if uri else "refused in words")
    shutil.rmtree(work)


VICTIMS = ("container", "picture")
PLACES = [(name, victim) for name in sorted(FORMATS) for victim in VICTIMS]
REPLACED = {f"{name}-{victim}-{kind}": (name, victim, kind) for name, victim in PLACES for kind in SPECIAL_FILES}
# Each format and victim once, each kind several times, and what can be read.
SHORT = {"-".join((*place, [*SPECIAL_FILES][at % len(SPECIAL_FILES)])) for at, place in enumerate(PLACES)}
SHORT |= {f"{name}-container-{kind}" for name, kind in READABLE}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "victim", "kind"), chosen(REPLACED, SHORT.__contains__).values())
def test_a_special_file_is_refused_or_counted(
    originals: dict[str, tuple[Path, str]], tmp_path: Path, name: str, victim: str, kind: str
) -> None:
    original, relative = originals[name]
    folder = Path(shutil.copytree(original, tmp_path / "set"))
    files = sorted(path for path in folder.rglob("*") if (path.suffix == ".png") == (victim == "picture"))
    if not files:
        pytest.skip(f"{name} holds its pictures inside")
    SPECIAL_FILES[kind](files[0])
    uri = prepare_or_refuse(tmp_path / "root", str(folder / relative))
    if victim == "picture":
        (reject,) = map(json.loads, Path(uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines())
        assert reject["code"] == REJECT_CODES.get(kind, "ref.missing"), reject
    else:
        assert bool(uri) == ((name, kind) in READABLE), "a container that cannot be read is no set of samples"


def prepare_or_refuse(root: Path, source: str) -> str:
    """URI of what was prepared, by the law; empty where preparation refused in words."""
    config = job_config(root, source=source, validation_fraction=0.0, max_reject_fraction=1.0)
    try:
        uri = run_prepare(config).uri
    except UserError as error:
        assert error.code in (ExitCode.DATA, ExitCode.CONFIG), error
        assert not (root / "prepared").exists()
        return ""
    check_law(uri)
    return uri


def check_law(uri: str) -> None:
    """accepted + rejected == read, in the summary, in the lines of rejects and in the index."""
    summary = json.loads(Path(uri, "rejects_summary.json").read_text(encoding="utf-8"))
    index = Index.load(uri)
    assert summary["accepted"] + summary["rejected"] == summary["read"]
    assert summary["rejected"] == len(Path(uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines())
    assert summary["accepted"] == sum(len(index.split(split)) for split in SPLITS)
