"""A damaged or cut file of weights is named by a sentence before any weight is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.safetensors_header import read_header, read_index, require_whole_folder

NAME = "model.safetensors"
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def write(path: Path, *names: str) -> bytes:
    save_file({name: torch.arange(60.0).reshape(6, 10) for name in names} | {"empty": torch.zeros(0, 3)}, path)
    return path.read_bytes()


def with_header(whole: bytes, change: Any) -> bytes:
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + size :]


def test_a_whole_file_gives_its_shapes(tmp_path: Path) -> None:
    write(tmp_path / NAME, "a", "b")
    shapes = {name: place.shape for name, place in read_header(tmp_path / NAME).items()}
    assert shapes == {"a": (6, 10), "b": (6, 10), "empty": (0, 3)}
    assert require_whole_folder(tmp_path) == 3


@pytest.mark.parametrize("percent", range(0, 100, 5))
def test_every_cut_is_named(tmp_path: Path, percent: int) -> None:
    whole = write(tmp_path / NAME, "a", "b")
    (tmp_path / NAME).write_bytes(whole[: len(whole) * percent // 100])
    with pytest.raises(DataError, match=r"model\.safetensors has") as error:
        require_whole_folder(tmp_path)
    assert "download the model again" in error.value.fix


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "F31"), ("dtype", 7), ("dtype", "F64"), ("shape", [6, 11]), ("shape", [-6, -10]), ("shape", "x"),
     ("shape", [True, 60]), ("data_offsets", [0, 999]), ("data_offsets", [8, 248]), ("data_offsets", [0]),
     ("data_offsets", None), ("data_offsets", [240, 0])],
)  # fmt: skip
def test_every_field_of_the_header_is_checked(tmp_path: Path, field: str, value: Any) -> None:
    whole = write(tmp_path / NAME, "a", "b")
    (tmp_path / NAME).write_bytes(with_header(whole, lambda header: header["a"].update({field: value})))
    with pytest.raises(DataError, match=r"model\.safetensors has"):
        read_header(tmp_path / NAME)


def test_what_this_takes_safetensors_takes(tmp_path: Path) -> None:
    """Flips in the header: none is an error of the library, which names no file."""
    whole, draw = write(tmp_path / NAME, "a", "b"), random.Random(3)
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(400):
        data = bytearray(whole)
        data[draw.randrange(header_bytes)] ^= 1 << draw.randrange(8)
        (tmp_path / NAME).write_bytes(data)
        try:
            read_header(tmp_path / NAME)
        except DataError:
            continue
        try:
            with safe_open(tmp_path / NAME, framework="pt") as file:
                assert list(file.keys())
        except SafetensorError as error:
            pytest.fail(f"{error}: {bytes(data[:header_bytes])!r}")


@pytest.mark.parametrize(
    ("index", "problem"),
    [("{", "is no index"), ("[]", "is no index"), ("{}", "is no index"), ('{"weight_map": [1]}', "is no index"),
     ({"a": "../good/model.safetensors"}, "no .safetensors file of"), ({"a": "/model.safetensors"}, "no .safetensors"),
     ({"a": "pytorch_model.bin"}, "no .safetensors file"), ({"a": 3}, "no .safetensors file"),
     ({"a": "x.safetensors"}, "not in the folder"), ({"c": SHARDS["a"]}, "does not hold it")],
)  # fmt: skip
def test_an_index_names_files_of_its_folder(tmp_path: Path, index: Any, problem: str) -> None:
    for name, file in SHARDS.items():
        write(tmp_path / file, name)
    path = tmp_path / f"{NAME}.index.json"
    path.write_text(json.dumps({"weight_map": SHARDS}), encoding="utf-8")
    assert require_whole_folder(tmp_path) == 4 and read_index(path) == SHARDS
    path.write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}), encoding="utf-8")
    with pytest.raises(DataError, match=rf"index\.json .*{problem}"):
        require_whole_folder(tmp_path)
