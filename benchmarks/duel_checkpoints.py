"""The same damage before everybody's checkpoints: who notices, and what is left to go on from. `make duel`

Real libraries and real files, on the CPU. Each side saves steps 1 and 2 of the same weights; then step 2 is damaged and
the newest is asked for. Whoever goes on from step 1 has lost one interval; whoever loads wrong bytes has lost the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import duel_deepspeed
from benchmarks.duel_deepspeed import RANKS, Job, weights
from benchmarks.report import UnfairError
from trainer.checkpoint.commit import (
    CommitRecord,
    checkpoint_name,
    commit,
    fetch_folder,
    upload_node_files,
)
from trainer.checkpoint.mirror import newest_good_of
from trainer.errors import UserError
from trainer.storage.local import LocalStorage

STEPS = (1, 2)
State = dict[str, Tensor]
SILENT, REFUSED, FELL_BACK = "loads wrong bytes, in silence", "refuses, and has nothing else", "goes on from step 1"
RIGHT = "loads right bytes"


@dataclass(frozen=True)
class Library:
    """How a library writes a state of two tensors into two files of a folder, and reads it."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[Path], State]


def state_of(step: int) -> State:
    return {"a": weights(step), "b": weights(step) + 0.5}


def _torch_save(state: State, folder: Path) -> None:
    for name, tensor in state.items():
        torch.save({name: tensor}, folder / f"{name}.pt")


def _torch_load(folder: Path) -> State:
    files = [folder / f"{name}.pt" for name in state_of(0)]
    return {name: tensor for file in files for name, tensor in torch.load(file, weights_only=True).items()}


def _safetensors_save(state: State, folder: Path) -> None:
    for name, tensor in state.items():
        safetensors.torch.save_file({name: tensor}, folder / f"{name}.safetensors")


def _safetensors_load(folder: Path) -> State:
    files = [folder / f"{name}.safetensors" for name in state_of(0)]
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def _dcp_save(state: State, folder: Path) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))


def _dcp_load(folder: Path) -> State:
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    return state


LIBRARIES = (
    Library("torch.save and torch.load", _torch_save, _torch_load),
    Library("safetensors", _safetensors_save, _safetensors_load),
    Library("torch DCP", _dcp_save, _dcp_load),
)


def flip_a_bit(folder: Path) -> None:
    """One bit in the middle of a tensor, wherever the library has put it."""
    middle = weights(2).flatten()[WINDOW].numpy().tobytes()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if (place := data.find(middle)) >= 0:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            return
    raise LookupError(f"no file of {folder} holds the tensor's bytes as they are")


WINDOW = slice(3 * weights(0).numel() // 4, 3 * weights(0).numel() // 4 + 16)  # of what ZeRO's rank 1 holds


def lose_a_file(folder: Path) -> None:
    """The largest file that holds a tensor."""
    max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size).unlink()


DAMAGES = {"a flipped bit": flip_a_bit, "a missing file": lose_a_file}


def stock(library: Library, damage: Callable[[Path], None]) -> str:
    """The library by itself: the newest folder is damaged and loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        for step in STEPS:
            library.save(state_of(step), _made(Path(scratch, f"step-{step}")))
        newest = Path(scratch, "step-2")
        _require(_verdict(library.load(newest)) == RIGHT, f"{library.name} reads back what it wrote")
        damage(newest)
        try:
            loaded = library.load(newest)
        except (Exception, CheckpointException):  # each library has its own: that it raised is the answer
            return REFUSED
        return _verdict(loaded)


def ours(library: Library, damage: Callable[[Path], None]) -> str:
    """The same library's files under the commit protocol: its newest folder is damaged and the newest good loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        store = LocalStorage(Path(scratch, "run"))
        for step in STEPS:
            staging = _made(Path(scratch, f"step-{step}"))
            library.save(state_of(step), staging)
            _committed(store, step, [staging])
        damage(store.path(f"checkpoints/{checkpoint_name(1, 2, 'duel')}"))
        _, found, _ = newest_good_of([store])
        assert found is not None
        return _verdict(library.load(fetch_folder(store, found, Path(scratch, "loaded"))))


def _verdict(loaded: State) -> str:
    for step in STEPS:
        if all(torch.equal(loaded[name], tensor) for name, tensor in state_of(step).items()):
            return FELL_BACK if step == 1 else RIGHT
    return SILENT


def _committed(store: LocalStorage, step: int, nodes: list[Path]) -> None:
    record = CommitRecord(
        attempt=1,
        epoch=0,
        step=step,
        sequences_consumed=0,
        world_size=len(nodes),
        num_nodes=len(nodes),
        strategy="",
        checkpoint_format="",
        plan_sha256="",
        model_sha256="",
        tower_sha256="",
        versions={},
    )
    name = checkpoint_name(1, step, "duel")
    for node, staging in enumerate(nodes):
        if staging.exists():  # a node whose process was killed uploads nothing
            upload_node_files(store, name, node, staging)
    commit(store, name, record)


def deepspeed() -> dict[str, tuple[str, str]]:
    """Damage -> (stock, ours), on two ranks of ZeRO 1. The missing file is that of a rank killed in its save."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, torn = Path(scratch, "whole"), Path(scratch, "torn")
        first, second = duel_deepspeed.run(
            [
                *(Job("save", str(whole), f"step-{step}", step) for step in STEPS),
                *(Job("load", str(whole), f"step-{step}") for step in STEPS),
                Job("save", str(torn), "step-1", 1),
                Job("save and kill rank 1", str(torn), "step-2", 2),
            ]
        )
        read_back = [[rank[2:4] for rank in (first, second)]] == [[[{"step": 1}, {"step": 2}]] * 2]
        _require(read_back, "DeepSpeed reads back what it wrote")
        _require((torn / "latest").read_text() == "step-2", "`latest` names the step whose save was cut off")
        stores = {"a flipped bit": whole, "a missing file": torn}
        good = {damage: _under_our_protocol(folder, Path(scratch, damage), damage) for damage, folder in stores.items()}
        flip_a_bit(whole / "step-2")
        # The torn one comes last: the rank that can load waits for the one that cannot.
        jobs = [Job("load", str(folder)) for folder in (*good.values(), whole, torn)]
        answers = list(zip(*_padded(duel_deepspeed.run(jobs), len(jobs)), strict=True))
    verdicts = [_ranks_verdict(ranks) for ranks in answers]
    return {"a flipped bit": (verdicts[2], verdicts[0]), "a missing file": (verdicts[3], verdicts[1])}


def _under_our_protocol(saved: Path, scratch: Path, damage: str) -> Path:
    """DeepSpeed's files of both steps, committed by us where possible. A folder with what our reader chooses."""
    store = LocalStorage(scratch / "run")
    for step in STEPS:
        nodes = [scratch / f"step-{step}-{rank}" for rank in range(RANKS)]
        for path in (saved / f"step-{step}").iterdir():
            rank = 1 if path.name.startswith("zero_pp_rank_1") else 0
            (_made(nodes[rank]) / path.name).write_bytes(path.read_bytes())
        with contextlib.suppress(UserError):  # the manifest of the killed rank's node is not there
            _committed(store, step, nodes)
    if damage == "a flipped bit":
        flip_a_bit(store.path(f"checkpoints/{checkpoint_name(1, 2, 'duel')}"))
    _, found, _ = newest_good_of([store])
    assert found is not None
    folder = fetch_folder(store, found, scratch / "loaded")
    (folder.parent / "latest").write_text(folder.name)
    return folder.parent


def _padded(results: list[list[dict[str, Any]]], length: int) -> list[list[dict[str, Any]]]:
    silence: dict[str, Any] = {"error": "no answer"}
    return [[*rank, *([silence] * (length - len(rank)))] for rank in results]


def _ranks_verdict(ranks: tuple[dict[str, Any], ...]) -> str:
    if errors := [str(rank["error"]) for rank in ranks if "error" in rank]:
        _require(any("FileNotFoundError" in error for error in errors), f"the missing file is the cause: {errors}")
        return REFUSED
    steps = {rank["step"] for rank in ranks}
    return {frozenset({1}): FELL_BACK, frozenset({2}): RIGHT}.get(frozenset(steps), SILENT)


def _require(held: bool, what: str) -> None:
    if not held:
        raise UnfairError(f"this must hold for a fair duel, and does not: {what}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DCP says on every call that it runs in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def duel() -> list[tuple[str, str, str, str]]:
    """(damage, library, what it does by itself, what the same files do under our protocol)."""
    with _quiet():
        rows = [
            (damage, library.name, stock(library, do), ours(library, do))
            for damage, do in DAMAGES.items()
            for library in LIBRARIES
        ]
    rows += [(damage, "DeepSpeed ZeRO 1, 2 ranks", *verdicts) for damage, verdicts in deepspeed().items()]
    return sorted(rows, key=lambda row: list(DAMAGES).index(row[0]))


def main() -> None:
    """Print who notices."""
    table = Table("damage to the newest", "files of", "the library by itself", "under our commit protocol")
    for row in duel():
        table.add_row(*row)
    console = Console(width=130)
    console.print(table)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "safetensors", "deepspeed")}
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))


if __name__ == "__main__":
    main()
