"""Part `damage`: the same damage to checkpoints of several libraries: who notices, and what is left to resume from.

Real libraries and real files, on the CPU. Each side saves steps 1 and 2 of the same weights; then step 2 is damaged and
the newest is asked for. Whoever resumes from step 1 has lost one interval; whoever loads wrong bytes has lost the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.checkpoint import deepspeed_ranks
from benchmarks.checkpoint.deepspeed_ranks import RANKS, Job, weights
from benchmarks.checkpoint.stacked_layers import RECORD
from benchmarks.support.report import require_fair
from benchmarks.support.suite import Bench
from vlmpipe.trainer.checkpoint.commit import FOLDER, checkpoint_name, commit, upload_node_files
from vlmpipe.trainer.checkpoint.mirror.copies import newest_good_of
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.local import LocalStorage

STEPS = (1, 2)
State = dict[str, Tensor]
SILENT, REFUSED, FELL_BACK = "loads wrong bytes silently", "refuses, and has no other step", "resumes from step 1"
RIGHT = "loads right bytes"


@dataclass(frozen=True)
class Library:
    """How a library writes a state of two tensors into two files of a folder, and reads it."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[Path], State]


def state_of(step: int) -> State:
    return {"a": weights(step), "b": weights(step) + 0.5}


def _a_file_each(name: str, suffix: str, save: Callable[..., object], load: Callable[[Path], State]) -> Library:
    """A library that writes one tensor to a file."""

    def save_all(state: State, folder: Path) -> None:
        for key, tensor in state.items():
            save({key: tensor}, folder / f"{key}{suffix}")

    def load_all(folder: Path) -> State:
        return {key: load(folder / f"{key}{suffix}")[key] for key in state_of(0)}

    return Library(name, save_all, load_all)


def _dcp_save(state: State, folder: Path) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))


def _dcp_load(folder: Path) -> State:
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    return state


LIBRARIES = (
    _a_file_each("torch.save and torch.load", ".pt", torch.save, partial(torch.load, weights_only=True)),
    _a_file_each("safetensors", ".safetensors", safetensors.torch.save_file, safetensors.torch.load_file),
    Library("torch DCP", _dcp_save, _dcp_load),
)
WINDOW = slice(3 * weights(0).numel() // 4, 3 * weights(0).numel() // 4 + 16)  # of what ZeRO's rank 1 holds


def flip_a_bit(folder: Path) -> None:
    """One bit in the middle of a tensor, wherever the library has put it."""
    middle = weights(2).flatten()[WINDOW].numpy().tobytes()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if (place := data.find(middle)) >= 0:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            return
    raise LookupError(f"no file of {folder} holds the tensor's bytes as they are")


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
        require_fair(_verdict(library.load(newest)) == RIGHT, f"{library.name} reads back what it wrote")
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
        return _verdict(library.load(_newest_good(store, damage, Path(scratch, "loaded"))))


def _newest_good(store: LocalStorage, damage: Callable[[Path], None] | None, target: Path) -> Path:
    """The files that resuming would take, after the damage to step 2."""
    if damage:
        damage(store.path(f"{FOLDER}/{checkpoint_name(1, 2, 'bench')}"))
    _, found, _ = newest_good_of([store])
    assert found is not None
    return fetch_folder(store, found, target)


def _verdict(loaded: State) -> str:
    for step in STEPS:
        if all(torch.equal(loaded[name], tensor) for name, tensor in state_of(step).items()):
            return FELL_BACK if step == 1 else RIGHT
    return SILENT


def _committed(store: LocalStorage, step: int, nodes: list[Path]) -> None:
    record = dataclasses.replace(RECORD, step=step, world_size=len(nodes), num_nodes=len(nodes))
    name = checkpoint_name(1, step, "bench")
    for node, staging in enumerate(nodes):
        if staging.exists():  # a node whose process was killed uploads nothing
            upload_node_files(store, name, node, staging)
    commit(store, name, record)


def deepspeed() -> dict[str, tuple[str, str]]:
    """Damage -> (stock, ours), on two ranks of ZeRO 1. The missing file is that of a rank killed in its save."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, torn = Path(scratch, "whole"), Path(scratch, "torn")
        first, second = deepspeed_ranks.run(
            [
                *(Job("save", str(whole), f"step-{step}", step) for step in STEPS),
                *(Job("load", str(whole), f"step-{step}") for step in STEPS),
                Job("save", str(torn), "step-1", 1),
                Job("save and kill rank 1", str(torn), "step-2", 2),
            ]
        )
        read_back = [[rank[2:4] for rank in (first, second)]] == [[[{"step": 1}, {"step": 2}]] * 2]
        require_fair(read_back, "DeepSpeed reads back what it wrote")
        require_fair(
            (torn / "latest").read_text(encoding="utf-8") == "step-2", "`latest` names the step whose save was cut off"
        )
        stores = {"a flipped bit": whole, "a missing file": torn}
        good = {damage: _under_our_protocol(folder, Path(scratch, damage), damage) for damage, folder in stores.items()}
        flip_a_bit(whole / "step-2")
        # The torn one comes last: the rank that can load waits for the one that cannot.
        jobs = [Job("load", str(folder)) for folder in (*good.values(), whole, torn)]
        answers = list(zip_longest(*deepspeed_ranks.run(jobs), fillvalue={"error": "no answer"}))
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
    folder = _newest_good(store, flip_a_bit if damage == "a flipped bit" else None, scratch / "loaded")
    (folder.parent / "latest").write_text(folder.name, encoding="utf-8")
    return folder.parent


def _ranks_verdict(ranks: tuple[dict[str, Any], ...]) -> str:
    if errors := [str(rank["error"]) for rank in ranks if "error" in rank]:
        require_fair(any("FileNotFoundError" in error for error in errors), f"the missing file is the cause: {errors}")
        return REFUSED
    steps = {rank["step"] for rank in ranks}
    return {frozenset({1}): FELL_BACK, frozenset({2}): RIGHT}.get(frozenset(steps), SILENT)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def damage(bench: Bench) -> None:
    """What each library does by itself, and what the same files do under our commit protocol."""
    bench.expect(len(LIBRARIES) + 1)
    verdicts: dict[tuple[str, str], tuple[str, str]] = {}  # (damage, library): by itself, under our protocol
    for number, library in enumerate(LIBRARIES):
        bench.at(library.name, number)
        with warnings.catch_warnings(action="ignore"):  # DCP says on every call that it runs in one process
            verdicts |= {(name, library.name): (stock(library, do), ours(library, do)) for name, do in DAMAGES.items()}
    bench.at("DeepSpeed ZeRO 1, 2 ranks", len(LIBRARIES))
    verdicts |= {(name, "DeepSpeed ZeRO 1, 2 ranks"): both for name, both in deepspeed().items()}
    for (name, files), (by_itself, under_ours) in sorted(verdicts.items(), key=lambda item: item[0][0]):
        bench.report.answer(
            f"{name}: files of {files}", f"under the commit protocol, {under_ours}", f"by itself, {by_itself}"
        )
