"""What a program leaves is a whole model of the right kind, or the sentence says what is wrong with it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.external.result import CONFIG, require_change, require_result

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def trainer(result: str = "hf-model") -> ExternalTrainerConfig:
    own = () if result.startswith("hf") else ("true",)
    return ExternalTrainerConfig(name="t", command=("t",), result=result, evaluate_command=own)  # type: ignore[arg-type]


def weights(path: Path, *, value: float = 1.0, kind: Any = np.float32) -> None:
    save_file({"a.weight": np.ones(3, kind), "b.weight": np.array([0, value], kind)}, path)


def model(folder: Path, model_type: str = "tiny") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"model_type": model_type}))
    weights(folder / "model.safetensors")
    return folder


def sharded(folder: Path, *present: str) -> Path:
    model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))})
    )
    for name in present:
        weights(folder / name)
    return folder


def refused(output: Path, result: str = "hf-model") -> str:
    with pytest.raises(UserError) as caught:
        require_result(trainer(result), output, "tiny")
    assert caught.value.code == ExitCode.BAD_RESULT
    assert caught.value.expected
    return caught.value.found


@pytest.mark.parametrize("place", ["", "v0-20261125"], ids=["where it was told", "in a folder of the trainer's own"])
def test_a_model_is_found_also_beside_checkpoints(tmp_path: Path, place: str) -> None:
    folder = model(tmp_path / place)
    (folder / "checkpoint-3").mkdir()
    model(folder / "checkpoint-3")
    assert require_result(trainer(), tmp_path, "tiny") == folder
    assert require_result(trainer(), tmp_path, "") == folder, "the type of a model on the hub is not known"


def test_all_shards_of_a_model_are_needed(tmp_path: Path) -> None:
    assert "lists model-00002-of-00002.safetensors, which is not there" in refused(
        sharded(tmp_path / "half", SHARDS[0])
    )
    assert require_result(trainer(), sharded(tmp_path / "whole", *SHARDS), "tiny")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def endless_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def with_header(header: object, body: bytes = b"") -> Callable[[Path], object]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def tensor(start: object, end: object, *shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


BAD_HEADERS = {
    "no JSON": with_header(b'{"a'),
    "nested too deep": with_header(b'{"a":' * 50_000),
    "a list": with_header([1, 2]),
    "no tensor": with_header({"__metadata__": {}}),
    "a tensor that is a number": with_header({"a": 1}),
    "a tensor without offsets": with_header({"a": {"dtype": "F32", "shape": [1]}}),
    "an offset that is text": with_header({"a": tensor("x", 4, 1)}, bytes(4)),
    "an end before the beginning": with_header({"a": tensor(8, 4, 1)}, bytes(4)),
    "a beginning in the header": with_header({"a": tensor(-4, 4, 2)}, bytes(4)),
    "a shape of other bytes": with_header({"a": tensor(0, 4, 7)}, bytes(4)),
    "overlapping tensors": with_header({"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, bytes(12)),
    "bytes of no tensor": with_header({"a": tensor(4, 8, 1)}, bytes(8)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_of_weights_is_named(tmp_path: Path, name: str) -> None:
    BAD_HEADERS[name](model(tmp_path / "output"))
    assert "model.safetensors is cut off or damaged" in refused(tmp_path / "output")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "left no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "left no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cut off or damaged"),
        (cut_off, "cut off or damaged"),
        (endless_header, "cut off or damaged"),
        (lambda folder: model(folder, "other"), "a model of type other"),
        (
            lambda folder: weights(folder / "model.safetensors", value=float("nan")),
            "not finite: b.weight in model.safe",
        ),
        (
            lambda folder: weights(folder / "model.safetensors", value=float("inf"), kind=np.float16),
            "not finite: b.wei",
        ),
    ],
)
def test_what_is_no_whole_model_of_the_family_is_said(
    tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    folder = model(tmp_path / "output")
    damage(folder)
    assert sentence in refused(tmp_path / "output")


def test_a_bf16_infinity_is_found(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    body = struct.pack("<HH", 0x7F7F, 0x7F80)  # the largest finite number, and infinity
    file = model(tmp_path / "output") / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + body[:2] * 2)
    assert require_result(trainer(), tmp_path / "output", "tiny")
    file.write_bytes(struct.pack("<Q", len(header)) + header + body)
    assert "not finite: w" in refused(tmp_path / "output")


def test_nothing_and_two_results_are_refused(tmp_path: Path) -> None:
    for kind in ("hf-model", "hf-adapter", "saved-model", "opaque"):
        assert "ended well and wrote nothing" in refused(tmp_path, kind)
    model(tmp_path / "one")
    model(tmp_path / "two")
    assert "left 2 folders with config.json" in refused(tmp_path)


def test_other_kinds_have_their_own_marker(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "left no saved_model.pb" in refused(tmp_path, "saved-model")
    assert "left no adapter_config.json" in refused(tmp_path, "hf-adapter")
    assert require_result(trainer("opaque"), tmp_path, "tiny") == tmp_path
    (tmp_path / "export").mkdir()
    (tmp_path / "export/saved_model.pb").write_bytes(b"graph")
    assert require_result(trainer("saved-model"), tmp_path, "tiny") == tmp_path / "export"
    (tmp_path / "adapter_config.json").write_text("{}")
    weights(tmp_path / "adapter_model.safetensors", value=float("nan"))
    assert "not finite" in refused(tmp_path, "hf-adapter")


def adapter(folder: Path, up: float) -> Path:
    folder.mkdir()
    halves = {"q.lora_A.weight": np.ones(3, np.float32), "q.lora_B.weight": np.array([0, up], np.float32)}
    save_file(halves, folder / "adapter_model.safetensors")
    return folder


def test_a_result_that_is_the_base_is_refused(tmp_path: Path) -> None:
    base, same = model(tmp_path / "base"), model(tmp_path / "same")
    with pytest.raises(UserError, match="all 2 weights of the base are as they were") as refused:
        require_change(trainer(), same, base)
    assert refused.value.code == ExitCode.BAD_RESULT


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_one_changed_weight_is_a_change(name: str, tmp_path: Path) -> None:
    base, other = model(tmp_path / "base"), model(tmp_path / "other")
    changed = {"a.weight": np.ones(3, np.float32), "b.weight": np.array([0, 1], np.float32)}
    changed[name][-1] += 1e-6
    save_file(changed, other / "model.safetensors")
    require_change(trainer(), other, base)


@pytest.mark.parametrize("names", [("x", "y"), ()], ids=["renamed", "no safetensors in the base"])
def test_weights_that_cannot_be_compared_are_not_judged(names: tuple[str, ...], tmp_path: Path) -> None:
    base, same = model(tmp_path / "base"), model(tmp_path / "same")
    (base / "model.safetensors").unlink()
    if names:
        save_file({name: np.ones(3, np.float32) for name in names}, base / "model.safetensors")
    require_change(trainer(), same, base)


def test_an_adapter_whose_upper_halves_are_zero_adds_nothing(tmp_path: Path) -> None:
    require_change(trainer("hf-adapter"), adapter(tmp_path / "trained", 1.0), tmp_path)
    with pytest.raises(UserError, match="adds nothing"):
        require_change(trainer("hf-adapter"), adapter(tmp_path / "new", 0.0), tmp_path)
