"""Check whether a program's result is a whole model: its files are checked without building it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.external.follow import json_object
from vlmpipe.trainer.models.safetensors_header import read_header

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, INDEX = ".safetensors", ".safetensors.index.json"
SAVED_MODEL = "saved_model.pb"
CHUNK_NUMBERS = 1 << 24
PIECE_BYTES = 1 << 24
# A float is infinite or no number where all bits of its exponent are set.
EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("uint64", 0x7FF0000000000000), "F32": ("uint32", 0x7F800000), "F16": ("uint16", 0x7C00),
    "BF16": ("uint16", 0x7F80),
}  # fmt: skip


def bad_result(problem: str, *, expected: str = "", fix: str = "") -> UserError:
    """The error of a program that ended well without leaving a finished model (exit 68)."""
    return UserError(problem, expected=expected, fix=fix, code=ExitCode.BAD_RESULT)


def require_result(trainer: ExternalTrainerConfig, output: Path, model_type: str) -> Path:
    """The folder of the result, `output` or the only one below it that holds one. Raises UserError (68).

    Args:
        model_type: of the base model; empty where it is not known.
    """
    marker = {"hf-model": CONFIG, "hf-adapter": ADAPTER_CONFIG, "saved-model": SAVED_MODEL}.get(trainer.result)
    expected = f"{marker} in {{output}}" if marker else "files in {output}"
    if not any(path.is_file() for path in output.rglob("*")):
        raise bad_result(
            f"train.trainer {trainer.name} ended well and wrote nothing",
            expected=f"{expected}, as train.trainer.result is {trainer.result}",
            fix="pass {output} to the program, or have it write to the folder in VLMPIPE_OUTPUT",
        )
    if marker is None:
        return output
    folder = _folder_of(output, marker, trainer)
    if trainer.result == "saved-model":
        return folder
    if trainer.result == "hf-model":
        written = str(_json(folder / CONFIG).get("model_type", ""))
        if model_type and written != model_type:
            raise bad_result(
                f"train.trainer {trainer.name} wrote a model of type {written or 'unknown'}",
                expected=f"{model_type}, the type of the model that it was given",
                fix="train the model in {model}, and save that model",
            )
    _require_whole_weights(folder, trainer.name)
    return folder


def require_change(trainer: ExternalTrainerConfig, folder: Path, base: Path) -> None:
    """Raise UserError (68) for weights that all equal the base's, and for an adapter that adds nothing to it.

    Weights are compared by name; where none of the base's is in the result, as after a renaming, nothing is known.
    """
    if trainer.result == "hf-adapter":
        halves = [entry for name, entry in _tensors(folder).items() if ".lora_B." in name]  # which begin as zeros
        is_same = bool(halves) and not any(any(map(any, entry.read())) for entry in halves)
        problem = "left an adapter that adds nothing: every lora_B is zero"
    elif trainer.result == "hf-model":
        before, after = _tensors(base), _tensors(folder)
        shared = [name for name in after if name in before]  # the last layers first: those are trained most often
        is_same = bool(shared) and all(after[name].equals(before[name]) for name in reversed(shared))
        problem = f"left the model that it was given: all {len(shared)} weights of the base are as they were"
    else:
        return
    if is_same:
        raise bad_result(
            f"train.trainer {trainer.name} {problem}",
            expected="weights that training has changed",
            fix="have the program save what it trained to {output}; check its learning rate and what it freezes",
        )


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a safetensors file."""

    file: Path
    form: tuple[str, tuple[int, ...]]
    start: int
    size_bytes: int

    def read(self) -> Iterator[bytes]:
        """The file's bytes, in pieces."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            for done in range(0, self.size_bytes, PIECE_BYTES):
                yield stream.read(min(PIECE_BYTES, self.size_bytes - done))

    def equals(self, other: _Tensor) -> bool:
        return self.form == other.form and all(a == b for a, b in zip(self.read(), other.read(), strict=True))


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """The tensors of a folder's safetensors files by name, in the order of the files; nothing where it has none."""
    tensors = {}
    for file in sorted(folder.glob(f"*{WEIGHTS}")):
        for name, place in read_header(file).items():
            tensors[name] = _Tensor(file, (place.dtype, place.shape), place.start, place.end - place.start)
    return tensors


def _folder_of(output: Path, marker: str, trainer: ExternalTrainerConfig) -> Path:
    """Not a checkpoint's: those are folders of intermediate states."""
    if (output / marker).is_file():
        return output
    folders = sorted({path.parent for path in output.rglob(marker) if not path.parent.name.startswith("checkpoint-")})
    if len(folders) == 1:
        return folders[0]
    what = f"{len(folders)} folders with {marker}" if folders else f"no {marker}"
    raise bad_result(
        f"train.trainer {trainer.name} left {what} in {{output}}",
        expected=f"one result, as train.trainer.result is {trainer.result}",
        fix="have the program save the trained model to {output} at the end, and checkpoints to {checkpoints}",
    )


def _require_whole_weights(folder: Path, name: str) -> None:
    files = sorted(folder.glob(f"*{WEIGHTS}"))
    for index in folder.glob(f"*{INDEX}"):
        weight_map = _json(index).get("weight_map", {})
        if not isinstance(weight_map, dict):
            raise bad_result(
                f"train.trainer {name} left half a model: {index.name} lists no files", expected="weight_map, an object"
            )
        listed = {folder / str(file) for file in weight_map.values()}
        if missing := sorted(listed - set(files)):
            raise bad_result(
                f"train.trainer {name} left half a model: {index.name} lists {missing[0].name}, which is not there",
                expected="all files of the model",
            )
    if not files:
        raise bad_result(
            f"train.trainer {name} left no weights",
            expected=f"files that end in {WEIGHTS}",
            fix="save with safetensors, as save_pretrained does",
        )
    for file in files:
        if bad := next(_not_finite(file, name), ""):
            raise bad_result(
                f"train.trainer {name} left numbers that are not finite: {bad} in {file.name}",
                expected="weights without NaN and infinity",
                fix="lower the learning rate, or find the step at which the loss was lost in metrics.jsonl",
            )


def _not_finite(file: Path, name: str) -> Iterator[str]:
    """Names of the weights with NaN or infinity. Raises UserError (68) for a file that is not whole."""
    try:
        places = read_header(file)
    except DataError as error:
        raise _damaged(file, name) from error
    if not places:
        raise _damaged(file, name)
    with file.open("rb") as stream:
        for key, place in places.items():
            if place.dtype not in EXPONENTS:
                continue
            kind, bits = EXPONENTS[place.dtype]
            exponent = np.asarray(bits, kind)
            stream.seek(place.start)
            left = (place.end - place.start) // np.dtype(kind).itemsize
            while left:
                numbers = np.fromfile(stream, kind, min(left, CHUNK_NUMBERS))
                left -= len(numbers)
                if ((numbers & exponent) == exponent).any():
                    yield key
                    break


def _damaged(file: Path, name: str) -> UserError:
    return bad_result(
        f"train.trainer {name} left half a model: {file.name} is cut off or damaged",
        expected="whole safetensors files",
    )


def _json(path: Path) -> dict[str, object]:
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}


def model_type_of(folder: str) -> str:
    """The type of the model in a folder; empty for a hub id."""
    return str(_json(Path(folder, CONFIG)).get("model_type", ""))
