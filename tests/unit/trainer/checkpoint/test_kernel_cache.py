"""Compiled kernels travel in checkpoints, to environments like their own only, and are unpickled after they verify."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.checkpoint import kernel_cache
from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.kernel_cache import kernel_files, load_kernels
from vlmpipe.trainer.checkpoint.resume import resume
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.layers.compile import CACHE_VARIABLE
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.strategies.base import SavedFiles

WORKER = ProcessContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
KERNELS = b"kernels"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch is given to unpickle, in a process that has compiled `KERNELS`."""
    given: list[bytes] = []
    monkeypatch.setattr(kernel_cache, "INDUCTOR", "sys")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (KERNELS, None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", given.append)
    return given


def save(folder: Path, worker: ProcessContext = WORKER) -> None:
    for name, content in kernel_files(worker).items():
        torch.save(content, folder / name)


def test_what_was_compiled_is_loaded_by_the_same_rank_of_any_node(tmp_path: Path, loaded: list[bytes]) -> None:
    save(tmp_path)
    load_kernels(tmp_path, replace(WORKER, rank=8, world_size=16, local_world_size=8))
    assert loaded == [KERNELS]


def test_another_rank_of_the_node_has_kernels_of_its_own(tmp_path: Path, loaded: list[bytes]) -> None:
    save(tmp_path)
    load_kernels(tmp_path, replace(WORKER, rank=1, world_size=2, local_rank=1, local_world_size=2))
    assert loaded == []


@pytest.mark.parametrize("changed", [(torch, "__version__"), (sys, "version")])
def test_kernels_of_another_environment_are_ignored(
    changed: tuple[Any, str], tmp_path: Path, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(*changed, "another")
    load_kernels(tmp_path, WORKER)
    assert loaded == []


def test_one_node_saves_and_only_what_was_compiled(loaded: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kernel_files(WORKER)) == 1
    assert kernel_files(replace(WORKER, rank=8, world_size=16, local_world_size=8)) == {}
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    assert kernel_files(WORKER) == {}


def test_a_cache_that_cannot_be_written_is_said_and_training_goes_on(
    tmp_path: Path, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(artifacts: bytes) -> None:
        raise OSError("no space left")

    save(tmp_path)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", no_room)
    load_kernels(tmp_path, WORKER)
    assert "not used: no space left" in capsys.readouterr().out


class Stateless:
    """A strategy without state."""

    checkpoint_format = "dcp"

    def snapshot(self, folder: Path, group: Any) -> Callable[[], None]:
        return lambda: None

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        return {file: [(0, size)] for file, size in files.sizes_bytes.items()}

    def load(self, folder: Path) -> None: ...


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("damaged", [False, True])
def test_damaged_kernels_are_not_unpickled(damaged: bool, tmp_path: Path, loaded: list[bytes], group: None) -> None:
    store, strategy = LocalStorage(tmp_path / "run"), Stateless()
    claim_attempt(store, fresh=False)
    saver = CheckpointSaver(store, strategy, WORKER, Retention(2), FailedSaves(0.0), async_save=False)  # type: ignore[arg-type]
    for step in (1, 2):
        saver.save(record(step=step, world_size=1, num_nodes=1))
    newest = tmp_path / "run/checkpoints" / saver.saved.name
    (kernels,) = newest.glob("kernels-*")
    if damaged:
        kernels.write_bytes(kernels.read_bytes().replace(KERNELS, b"KERNELS"))
    found = resume([store], strategy, record(world_size=1, num_nodes=1), WORKER)  # type: ignore[arg-type]
    assert found is not None and found.checkpoint.record.step == (1 if damaged else 2)
    assert loaded == [KERNELS], "the step that counts"
    assert bool(found.passed_over) is damaged


@pytest.mark.slow
def test_inductor_finds_the_kernels_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch.compiler._cache import CacheArtifactManager

    def compiled(folder: Path) -> dict[str, int]:
        monkeypatch.setenv(CACHE_VARIABLE, str(folder))
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda numbers: (numbers.sin() * 3).sum())(torch.ones(7, requires_grad=True)).backward()
        return dict(counters["inductor"])

    with CacheArtifactManager.with_fresh_cache():
        assert compiled(tmp_path / "first")["fxgraph_cache_miss"] > 0
        save(tmp_path)
    with CacheArtifactManager.with_fresh_cache():
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "second"))
        load_kernels(tmp_path, WORKER)
        found = compiled(tmp_path / "second")
        assert found["fxgraph_cache_hit"] > 0 and "fxgraph_cache_miss" not in found
        assert kernel_files(WORKER), "the next checkpoint has them again"
