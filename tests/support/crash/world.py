"""A run's checkpoints without tensors: saving, damaging and judging them, on any store. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.trainer.checkpoints import NODES, newest_good, record
from vlmpipe.trainer.checkpoint.attempts import begin_at, claim_attempt, order_of
from vlmpipe.trainer.checkpoint.commit import (
    FOLDER,
    Checkpoint,
    Listing,
    checkpoint_name,
    commit,
    committed,
    name_newest,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.fault_points import VARIABLE
from vlmpipe.trainer.checkpoint.manifest import block_bytes_of
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old, sweep_leftovers
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder, verify
from vlmpipe.trainer.storage.base import Storage, crc32c_of

KEY = b"right"  # that signs
SHARD = "deep/shard-1"


def contents(step: int) -> dict[str, bytes]:
    """Every file of the checkpoint at `step`: of the same names and sizes whatever the step."""
    return {f"deep/shard-{node}": bytes([step, node]) * 2000 for node in range(NODES)} | {"small-0": bytes([step]) * 9}


def stage(scratch: Path, step: int, node: int) -> Path:
    """A folder with what the ranks of one node have written."""
    folder = scratch / f"staged-{step}-{node}"
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in contents(step).items():
        if name.endswith(f"-{node}"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return folder


def upload(
    store: Storage, scratch: Path, name: str, step: int, nodes: range = range(NODES), *, key: bytes = b""
) -> None:
    """What the leaders of `nodes` do of a save."""
    for node in nodes:
        upload_node_files(store, name, node, stage(scratch, step, node), key=key)


def save(store: Storage, scratch: Path, step: int, *, attempt: int = 1, nonce: str = "a", key: bytes = b"") -> str:
    """A committed checkpoint; its name."""
    name = checkpoint_name(attempt, step, nonce)
    upload(store, scratch, name, step, key=key)
    commit(store, name, record(attempt, step), key=key)
    name_newest(store, name)
    return name


def run_once(store: Storage, scratch: Path, *, keep: int = 1, key: bytes = b"") -> str:
    """One start of the training job that saves the step after the newest good one, and clears up."""
    mine = claim_attempt(store, fresh=False)
    found, _ = newest_good(store, key=key)
    step = found.record.step if found else 0
    begin_at(store, mine, step, most=0)
    name = save(store, scratch, step + 1, attempt=mine.attempt, key=key)
    sweep_leftovers(store, mine.attempt)
    delete_old(store, Retention(keep), newest=name, key=key)
    return name


def two_committed(store: Storage, scratch: Path) -> tuple[str, str]:
    """A run whose first start saved steps 1 and 2: what most cases begin with."""
    attempt = claim_attempt(store, fresh=False).attempt
    return save(store, scratch, 1, attempt=attempt), save(store, scratch, 2, attempt=attempt)


def loaded(store: Storage, scratch: Path, *, key: bytes = b"") -> Checkpoint:
    """The newest good checkpoint, whose bytes are compared with those that were saved at its step."""
    found, _ = newest_good(store, key=key)
    assert found is not None, "a committed checkpoint was lost"
    folder = fetch_folder(store, found, scratch / "loaded")
    try:
        assert {name: (folder / name).read_bytes() for name in contents(1)} == contents(found.record.step)
    finally:
        shutil.rmtree(scratch / "loaded")
    return found


def after_a_fault(
    store: Storage, scratch: Path, *, allowed: set[str], damaged: frozenset[str] = frozenset(), key: bytes = b""
) -> str:
    """The law of every case. Returns the checkpoint that the run goes on from.

    The newest good one is one of `allowed`, byte for byte. Everything that has a COMMIT is whole, but for what the case
    itself has `damaged`. The same program, started again, commits a newer one and leaves nothing unfinished behind.
    """
    found = loaded(store, scratch, key=key)
    assert found.name in allowed
    for name in set(committed(store)) - damaged:
        verify(store, name, key=key)
    newest = run_once(store, scratch, key=key)
    assert loaded(store, scratch, key=key).name == newest
    assert order_of(newest) > order_of(found.name)
    listing = Listing.read(store)
    assert listing.folders == set(listing.committed) == {newest}
    return found.name


def put(store: Storage, name: str, file: str, data: bytes) -> None:
    """Write over a file of a checkpoint, as nothing of ours would."""
    store.write(f"{FOLDER}/{name}/{file}", data)


def tamper(store: Storage, name: str, file: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of a checkpoint."""
    put(store, name, file, change(store.read(f"{FOLDER}/{name}/{file}")))


def flip(data: bytes) -> bytes:
    """One bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def sealed(content: dict[str, Any] | list[Any] | bytes) -> bytes:
    """A COMMIT with a right CRC32C, whatever it says."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return text + f"\n{crc32c_of(text):08x}".encode()


def ended(point: str, module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The end of a program that kills itself at `point`; empty: at none."""
    environment = {**os.environ, VARIABLE: point, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class Meanwhile:
    """A store at which something else happens once, right before one call of `method` on a name that ends so."""

    def __init__(self, store: Storage, method: str, ending: str, action: Callable[[], object]) -> None:
        self._store, self._method, self._ending, self._action = store, method, ending, action
        self.happened = False

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._store, attribute)
        if attribute != self._method:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.happened and any(str(each).endswith(self._ending) for each in arguments):
                self.happened = True
                self._action()
            return found(*arguments, **options)

        return call


def summing_to(crc32c: int, data: bytes) -> bytes:
    """`data` with other last four bytes, so that it has this CRC32C: a CRC is linear in its bits over GF(2)."""
    head = data[:-4]
    none = crc32c_of(head + bytes(4))
    basis: dict[int, tuple[int, int]] = {}  # highest bit of a change -> the change, and the bits that make it
    for bit in range(32):
        bits = 1 << bit
        change = crc32c_of(head + bits.to_bytes(4, "little")) ^ none
        while change and change.bit_length() in basis:
            other, more = basis[change.bit_length()]
            change, bits = change ^ other, bits ^ more
        basis[change.bit_length()] = (change, bits)
    wanted, found = none ^ crc32c, 0
    while wanted:
        change, bits = basis[wanted.bit_length()]
        wanted, found = wanted ^ change, found ^ bits
    return head + found.to_bytes(4, "little")


def forged(data: bytes) -> bytes:
    """Other bytes of the same size and CRC32C, of the whole and of each block."""
    other, size = contents(9)[SHARD], block_bytes_of(len(data))
    starts = range(0, len(data), size)
    return b"".join(summing_to(crc32c_of(data[at : at + size]), other[at : at + size]) for at in starts)


def on_another_machine(tmp_path: Path) -> None:
    """Forget what was downloaded: a file in the cache with the object's size and CRC32C is not fetched again."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
