"""The check that ranks reach each other and add correctly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vlmpipe.trainer.distributed.cluster_env import REPORT_VARIABLE
from vlmpipe.trainer.distributed.collectives import check_ranks
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.records import read_record_file


def worker(*, world_size: int) -> ProcessContext:
    return ProcessContext(0, world_size, 0, 1, torch.device("cpu"))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.Tensor], object]], None]:
    """Replaces a process group of two: an all-reduce given by the test, and a gather that knows one rank."""

    def install(all_reduce: Callable[[torch.Tensor], object]) -> None:
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(dist, "barrier", lambda: None)
        monkeypatch.setattr(dist, "all_gather_object", lambda found, value: found.__setitem__(0, value))

    return install


def test_bandwidth_and_node_reports_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Callable[..., None]
) -> None:
    group(lambda numbers: numbers.mul_(2))
    monkeypatch.setenv(REPORT_VARIABLE, '{"node": 0}')
    result = check_ranks(str(tmp_path), worker(world_size=2))
    assert result == read_record_file(tmp_path / "preflight.json")
    speed = result["all_reduce"]
    assert result["nodes"] == [{"node": 0}]
    assert speed["bus_gb_per_s"] == pytest.approx(speed["bytes"] / speed["seconds"] / 1e9), "2 (n-1) / n is 1 for two"


def test_wrong_sum_is_reported_as_broken_hardware(tmp_path: Path, group: Callable[..., None]) -> None:
    def flip_one(numbers: torch.Tensor) -> None:
        numbers.mul_(2)[17] += 0.5

    group(flip_one)
    with pytest.raises(UserError, match=r"over 2 ranks came out as 2 to 2\.5") as caught:
        check_ranks(str(tmp_path), worker(world_size=2))
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_unreachable_ranks_are_reported(tmp_path: Path, group: Callable[..., None]) -> None:
    def fail(_numbers: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    group(fail)
    with pytest.raises(UserError, match=r"the ranks cannot add up a tensor: Connection closed by peer\n") as caught:
        check_ranks(str(tmp_path), worker(world_size=2))
    assert caught.value.code == ExitCode.UNEXPECTED, "a rank that was killed has a cause, this is the consequence"
