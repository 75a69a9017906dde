"""The step sync_checkpoint: verified, mirrored, exported, handed on; and the same after a kill at any point."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.trainer.preloaded import REPOSITORY
from tests.support.trainer.runs import make_run, train_runs
from vlmpipe.components.sync_checkpoint import sync_checkpoint
from vlmpipe.trainer.checkpoint.commit import checkpoint_name, commit, committed, upload_node_files
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder, verify
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

SEED = int(os.environ.get("VLMPIPE_SYNC_SEED", "4"))
POINTS = int(os.environ.get("VLMPIPE_SYNC_POINTS", "6"))  # 0: all
TIMES = int(os.environ.get("VLMPIPE_SYNC_TIMES", "2"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """A run with two checkpoints, signed."""
    root = tmp_path_factory.mktemp("sync")
    (root / "key").write_text("secret")
    changes: dict[str, Any] = {"train.max_steps": 4, "train.checkpoint_every_steps": 2, "features.cache": "off"}
    changes["checkpoint.signing_key_file"] = str(root / "key")
    changes |= {"gate": {}, "register": {"model_name": "", "alias": "champion"}}  # the step asks the registry, too
    job = make_run(root, "run", {**changes, "checkpoint.mirror_uri": str(root / "mirror")}, features="off")
    train_runs([job], processes=1)
    assert len(committed(open_storage(job.run.run_uri))) == 2
    return job


@pytest.fixture
def job(trained: JobConfig) -> JobConfig:
    """The run as training left it."""
    shutil.rmtree(Path(trained.run.run_uri, "export"), ignore_errors=True)
    shutil.rmtree(trained.checkpoint.mirror_uri, ignore_errors=True)
    return trained


def mirrored(job: JobConfig) -> Storage:
    mirror = mirror_of(job)
    assert mirror is not None
    return mirror


def run_step(run_uri: str, folder: Path) -> SimpleNamespace:
    """The component as kfp calls it. Returns its model artifact, whose `metrics` are those of the other."""
    metrics: dict[str, float] = {}
    model = SimpleNamespace(uri="", metadata={}, metrics=metrics)
    report = SimpleNamespace(path=str(folder / "report.html"))
    assert sync_checkpoint(run_uri, "", model, SimpleNamespace(log_metric=metrics.__setitem__), report) == run_uri
    return model


def test_the_model_artifact_says_what_it_is(job: JobConfig, tmp_path: Path) -> None:
    model = run_step(job.run.run_uri, tmp_path)
    assert model.metrics["steps"] == 4 and "<html" in (tmp_path / "report.html").read_text()
    newest = committed(open_storage(job.run.run_uri))[-1]
    marker = json.loads(open_storage(job.run.run_uri).read("export/vlmpipe.json"))
    assert model.uri == f"{job.run.run_uri}/export"
    assert model.metadata == {
        "checkpoint": newest,
        "step": 4,
        "weights_sha256": marker["weights_sha256"],
        "mirror": mirrored(job).uri(f"checkpoints/{newest}"),
    }
    assert verify(mirrored(job), newest).record.step == 4
    record = json.loads(open_storage(job.run.run_uri).read("steps/sync-checkpoint.json"))
    assert record["state"] == "done" and newest in record["message"] and "mirrored to" in record["message"]


def test_a_run_without_a_mirror_has_none(job: JobConfig) -> None:
    without = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"mirror_uri": ""})})
    assert sync_run(without)["mirror"] == ""


def test_a_checkpoint_that_only_the_mirror_has_whole_is_exported(job: JobConfig, tmp_path: Path) -> None:
    shutil.copytree(job.run.run_uri, tmp_path / "before")
    straight = sync_run(job)
    store = open_storage(job.run.run_uri)
    try:
        store.delete_folder(f"checkpoints/{straight['checkpoint']}")
        store.delete_folder("export")
        again = sync_run(job)
    finally:
        shutil.rmtree(job.run.run_uri)
        shutil.copytree(tmp_path / "before", job.run.run_uri)
    assert again == straight


def test_an_unsigned_newer_checkpoint_is_neither_mirrored_nor_exported(job: JobConfig, tmp_path: Path) -> None:
    store = open_storage(job.run.run_uri)
    ours = verify(store, committed(store)[-1])
    planted = checkpoint_name(ours.record.attempt, 9, "planted")
    upload_node_files(store, planted, 0, fetch_folder(store, ours, tmp_path))
    commit(store, planted, dataclasses.replace(ours.record, step=9))
    try:
        described = sync_run(job)
    finally:
        store.delete_folder(f"checkpoints/{planted}")
    assert described["checkpoint"] == ours.name and committed(mirrored(job)) == [ours.name]
    assert described["passed_over"] == [f"in {store.root_uri}: {planted}: COMMIT is not signed with this run's key"]


def test_flipped_bits_are_found_in_weights_and_do_not_matter_elsewhere(job: JobConfig) -> None:
    """Of the newest checkpoint: it is exported as it was, or the one before is."""
    alone = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"mirror_uri": ""})})
    store = open_storage(alone.run.run_uri)
    old, newest = committed(store)
    straight = sync_run(alone)
    place = f"checkpoints/{newest}/__0_0.distcp"
    whole = store.read(place)
    exported = []
    for byte in range(500, len(whole), len(whole) // 8):
        store.delete_folder("export")
        store.write(place, whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        try:
            described = sync_run(alone)
        finally:
            store.write(place, whole)
        exported.append(described["checkpoint"])
        if described["checkpoint"] == newest:
            assert described == straight, byte
        else:
            damaged = f"in {store.root_uri}: {newest}: __0_0.distcp differs from its SHA-256"
            assert described["checkpoint"] == old and described["passed_over"] == [damaged], byte
    assert set(exported) == {old, newest}, "weights are a third of the file"


def test_a_mirror_gets_no_checkpoint_whose_moments_are_damaged(
    job: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_storage(job.run.run_uri)
    newest = committed(store)[-1]
    place = f"checkpoints/{newest}/rng-0.pt"
    whole = store.read(place)
    store.write(place, whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        described = sync_run(job)
    finally:
        store.write(place, whole)
    assert (described["checkpoint"], described["mirror"]) == (newest, "")
    assert "the mirror has no copy of the exported checkpoint" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(
    job: JobConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = job.model_copy(update={"run": job.run.model_copy(update={"run_id": "never-trained"})})
    open_storage(empty.run.run_uri).write("run.json", empty.model_dump_json().encode())
    with pytest.raises(SystemExit) as caught:
        run_step(empty.run.run_uri, tmp_path)
    assert caught.value.code == ExitCode.CONFIG
    assert "never-trained has no committed checkpoint" in capsys.readouterr().err


def test_a_mirror_in_the_cloud_survives_a_bad_network(
    job: JobConfig, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
    away = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"mirror_uri": "gs://bucket/second"})})
    gcs_server.faults += [
        Fault("drop_after", method="POST", path="/upload/"),
        Fault("corrupt_request", method="POST", path="/upload/"),
        Fault("status", method="POST", path="/upload/", code=503),
        Fault("drop_after", method="POST", path="COMMIT|/upload/", times=2),
    ]
    described = sync_run(away)
    assert all(fault.times == 0 for fault in gcs_server.faults)
    mirror = mirrored(away)
    assert described["mirror"] == f"gs://bucket/second/runs/run/checkpoints/{described['checkpoint']}"
    store, folder = open_storage(job.run.run_uri), f"checkpoints/{described['checkpoint']}"
    names = [info.name for info in store.list(folder)]
    assert [info.name for info in mirror.list(folder)] == names
    assert all(mirror.read(name) == store.read(name) for name in names)
    before = len(gcs_server.requests)
    sync_run(away)
    assert not [request for request in gcs_server.requests[before:] if request.startswith(("POST", "PUT", "DELETE"))]


@pytest.mark.slow
def test_mirroring_killed_at_any_point_can_be_repeated(job: JobConfig, tmp_path: Path) -> None:
    """`VLMPIPE_SYNC_POINTS=0` kills at every single change."""
    command = [sys.executable, "-m", "tests.support.drivers.sync_and_kill", "--config", f"{job.run.run_uri}/run.json"]
    command += ["--seed", str(SEED), "--points", str(POINTS), "--times", str(TIMES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["changes"] > 20 and len(result["trials"]) == (POINTS or result["changes"]) + TIMES
    for trial in result["trials"]:
        assert trial["export_is_whole"] or not trial["export_is_believed"], (SEED, trial)
        assert trial["same_in_the_end"], (SEED, trial)
    assert list(tmp_path.glob("vlmpipe-*")) == [], "the folders of killed calls are swept"
