"""Checks before training: what they find, and how they say it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch

from tests.fakes.gcs.accounts import AccountsGcs
from tests.fakes.gcs.server import FakeGcs, Fault
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.distributed.cluster_env import REPORT_VARIABLE
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight import devices
from vlmpipe.trainer.preflight import node as preflight
from vlmpipe.trainer.preflight.bought import BoughtMachine
from vlmpipe.trainer.preflight.gpus import FoundGpus
from vlmpipe.trainer.preflight.machine import MachineReport
from vlmpipe.trainer.preflight.node import GIB, announce, check_node
from vlmpipe.trainer.preflight.room import require_room
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes
from vlmpipe.trainer.storage.local import LocalStorage

MIB = 1 << 20


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs and without builds, whatever this one has."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(devices.glob, "glob", lambda _pattern: [])


@pytest.fixture
def gcs_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


def worker(rank: int = 0, world_size: int = 1, local_world_size: int = 1) -> ProcessContext:
    return ProcessContext(rank, world_size, rank % local_world_size, local_world_size, torch.device("cpu"))


def test_healthy_node_is_reported_in_one_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(scratch))  # where killed tests leave none
    report = check_node(str(run), node=0)
    assert not report.warnings
    assert "GiB free for temporary files, output written and read in" in report.line()
    assert list(run.iterdir()) == []


def test_a_module_without_a_run_has_only_its_machine_checked() -> None:
    assert check_node("", node=1).output_s is None


def test_report_is_passed_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORT_VARIABLE, "")
    announce(check_node(str(tmp_path), node=3))
    assert json.loads(os.environ[REPORT_VARIABLE])["node"] == 3


def test_warnings_go_to_stderr_whose_lines_vertex_ai_takes_for_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPORT_VARIABLE, "")
    report = check_node("", node=0)
    report.warnings.append("the clock is wrong")
    announce(report)
    said = capsys.readouterr()
    assert said.out == report.line() + "\n" and "the clock is wrong" in said.err


class Broken(LocalStorage):
    """A folder that fails as told."""

    denied = ""
    garbled = False

    def create(self, name: str, data: bytes) -> None:
        self._deny("create", name)
        super().create(name, b"other" if self.garbled else data)

    def delete(self, name: str) -> None:
        self._deny("delete", name)
        super().delete(name)

    def _deny(self, what: str, name: str) -> None:
        if what == self.denied:
            raise UserError(f"no permission while writing {name}", code=ExitCode.NO_PERMISSION)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    store = Broken(tmp_path)
    monkeypatch.setattr(preflight, "open_storage", lambda _uri: store)
    return store


def test_an_output_that_may_not_be_written_fails(broken: Broken) -> None:
    broken.denied = "create"
    with pytest.raises(UserError, match="no permission while writing preflight-0-") as caught:
        check_node("run", node=0)
    assert caught.value.code == ExitCode.NO_PERMISSION


def test_an_account_that_may_not_delete_is_refused_before_any_work(broken: Broken) -> None:
    broken.denied = "delete"
    with pytest.raises(UserError, match="which this account may create") as caught:
        check_node("run", node=0)
    assert caught.value.code == ExitCode.NO_PERMISSION and "old checkpoints" in caught.value.fix


def test_an_account_that_may_only_create_on_cloud_storage_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {("job", "bucket"): {"roles/storage.objectCreator", "roles/storage.objectViewer"}}
    with AccountsGcs({"job": "127.0.0.1"}, roles) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint_of("job"))
        with pytest.raises(UserError) as caught:
            check_node("gs://bucket/runs/1", node=0)
        assert caught.value.code == ExitCode.NO_PERMISSION
        assert "job does not have storage.objects.delete access" in caught.value.fix
        assert "roles/storage.objectUser" in caught.value.expected
        server.permissions["job", "bucket"].add("storage.objects.delete")
        assert not check_node("gs://bucket/runs/1", node=0).warnings


def test_wrong_bytes_read_back_are_reported(broken: Broken) -> None:
    broken.garbled = True
    with pytest.raises(UserError, match="read back with other bytes") as caught:
        check_node("run", node=0)
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_bucket_access_and_clock_are_checked(gcs_run: FakeGcs) -> None:
    report = check_node("gs://bucket/runs/1", node=0)
    assert gcs_run.buckets["bucket"] == {}
    assert any(request.startswith("DELETE") for request in gcs_run.requests)
    assert report.clock_ahead_s is not None and abs(report.clock_ahead_s) < 5 and not report.warnings


@pytest.mark.parametrize(("shift_s", "words"), [(600.0, "600 s ahead of"), (-90.0, "90 s behind")])
def test_clock_skew_is_a_warning(gcs_run: FakeGcs, monkeypatch: pytest.MonkeyPatch, shift_s: float, words: str) -> None:
    real = time.time
    shifted = SimpleNamespace(time=lambda: real() + shift_s, monotonic=time.monotonic)
    monkeypatch.setattr(preflight, "time", shifted)
    (warning,) = check_node("gs://bucket/runs/1", node=0).warnings
    seconds, *_ = warning.removeprefix("this machine's clock is ").split()
    assert abs(int(seconds) - abs(shift_s)) <= 5 and words.split(maxsplit=2)[2] in warning


def test_a_bucket_without_permission_fails_with_its_code(gcs_run: FakeGcs) -> None:
    gcs_run.faults.append(Fault("status", method="POST", code=403))
    with pytest.raises(UserError, match="no permission while writing gs://bucket/runs/1/preflight-2-") as caught:
        check_node("gs://bucket/runs/1", node=2)
    assert caught.value.code == ExitCode.NO_PERMISSION


def test_what_a_later_job_reads_is_asked_for_before_anything_is_trained() -> None:
    with FakeGcs(buckets=["bucket", "data", "closed"]) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        check_node("gs://bucket/runs/1", 0, with_reads("gs://data"))
        server.faults.append(Fault("status", method="GET", path="b/closed/", code=403))
        check_node("gs://bucket/runs/1", 0, with_reads("gs://data/questions/"))
        with pytest.raises(UserError, match=r"no permission while .*gs://closed/q.tsv") as caught:
            check_node("gs://bucket/runs/1", 0, with_reads("gs://data", "gs://closed/q.tsv"))
        assert caught.value.code == ExitCode.NO_PERMISSION and "cluster.machine_check=warn" in caught.value.fix
        server.faults.append(Fault("status", method="GET", path="b/closed/", code=403))
        report = check_node("gs://bucket/runs/1", 0, with_reads("gs://closed/q.tsv", check="warn"))
        assert [one["found"] for one in report.denied] == report.warnings and "no permission" in report.warnings[0]


def test_an_account_that_may_read_one_folder_only_is_not_refused() -> None:
    """A grant may have a condition on an object's name; of names outside, the service forbids even to look."""
    with FakeGcs(buckets=["bucket", "data"]) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        server.faults.append(Fault("status", method="GET", path="b/data/o/vlmpipe", code=403))
        check_node("gs://bucket/runs/1", 0, with_reads("gs://data/team/q.tsv"))
        assert server.faults, "nothing outside the folder was asked for"


def with_reads(*addresses: str, check: Literal["fail", "warn"] = "fail") -> MachineReport:
    machine = BoughtMachine(
        step="train",
        machine_type="g2-standard-4",
        accelerator_type="NVIDIA_L4",
        accelerator_count=1,
        reads=addresses,
        check=check,
    )
    return MachineReport(machine, FoundGpus("2", "12.6", "", (), "", "", ()), disk_bytes=0)


@pytest.mark.parametrize(("total", "warned"), [(64 * MIB, True), (GIB - 1, True), (GIB, False)])
def test_small_shared_memory_on_a_gpu_machine_is_a_warning(
    total: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.glob, "glob", lambda _pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _folder: Usage(total, 0, total))
    report = check_node("", node=0)
    assert report.shared_memory_bytes == total
    assert [("/dev/shm has" in warning) for warning in report.warnings] == ([True] if warned else [])


@pytest.mark.parametrize(("age_s", "warned"), [(60.0, False), (7200.0, True)])
def test_the_lock_of_a_killed_build_is_a_warning(tmp_path: Path, age_s: float, warned: bool) -> None:
    lock = tmp_path / "extensions/py311_cpu/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    assert [str(lock) in warning for warning in check_node("", node=0).warnings] == ([True] if warned else [])


SETTINGS = TrainConfig(global_batch_size=8, optimizer=OptimizerConfig(learning_rate=1e-3))


@pytest.mark.parametrize(
    ("nodes", "free", "fits"), [(1, 12_000, True), (1, 11_999, False), (4, 3_000, True), (4, 2_999, False)]
)
def test_a_checkpoint_needs_twelve_bytes_a_parameter_shared_by_the_nodes(
    nodes: int, free: int, fits: bool, monkeypatch: pytest.MonkeyPatch, gcs_run: FakeGcs
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _folder: Usage(free, 0, free))

    def check() -> None:
        sharded = SETTINGS.model_copy(update={"strategy": "fsdp"})
        require_room("gs://bucket/runs/1", 1000, worker(world_size=nodes), sharded)

    if fits:
        return check()
    with pytest.raises(UserError, match="no space left for a checkpoint") as caught:
        check()
    assert caught.value.code == ExitCode.CANNOT_WRITE


def test_a_folder_of_this_machine_needs_room_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    free = {run: 11_999}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(0, 0, free.get(folder, GIB)))
    with pytest.raises(UserError, match=f"checkpoint: {run} has 0.00 GiB free"):
        require_room(str(run), 1000, worker(world_size=4), SETTINGS)


def test_averages_count_in_the_checkpoint_size() -> None:
    settings = TrainConfig(global_batch_size=8, optimizer=OptimizerConfig(learning_rate=1e-3), ema_decay=0.9)
    assert checkpoint_bytes(10, SETTINGS) == 120
    assert checkpoint_bytes(10, settings) == 120 + 40


def test_free_space_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(tmp_path))
    assert check_node("", node=0).free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
