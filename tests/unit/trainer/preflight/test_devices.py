"""GPUs of a machine beside the processes that are to use them."""

from __future__ import annotations

import pytest

from tests.fakes.cuda import L4, FakeCuda
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight import devices
from vlmpipe.trainer.preflight.devices import require_gpu_each, visible_gpus
from vlmpipe.trainer.preflight.gpus import examine


@pytest.fixture
def four_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.glob, "glob", lambda _pattern: [f"/dev/nvidia{number}" for number in range(4)])


@pytest.mark.parametrize(("named", "count"), [(None, 4), ("", 0), ("0", 1), ("GPU-1, GPU-2", 2), ("0,1,2,3,4,5", 4)])
def test_as_many_gpus_count_as_the_environment_lets_a_process_see(
    four_files: None, named: str | None, count: int
) -> None:
    assert visible_gpus({} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == count


def test_more_processes_than_gpus_are_refused(four_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda: examine(FakeCuda(gpus=[L4, L4])))
    with pytest.raises(UserError, match="8 processes are to train on this machine, and torch sees 2 GPUs") as caught:
        require_gpu_each({}, 8)
    assert caught.value.code == ExitCode.MACHINE and "cluster.processes_per_replica=2" in caught.value.fix


@pytest.mark.parametrize("ranks", [1, 4])
def test_torch_is_not_asked_where_each_process_can_have_a_gpu(
    four_files: None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "look", lambda: pytest.fail("asked"))
    require_gpu_each({}, ranks)


def test_a_torch_for_cpus_lets_any_number_of_processes_train(four_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda: examine(FakeCuda(cuda="")))
    require_gpu_each({}, 8)
