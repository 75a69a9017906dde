"""A job of a sweep: its trainings equal those of a run of their own, one that fails leaves the others, and what is done
is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import encode_features, ends_of_ranks, losses, make_run, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.records.sweep import FeaturesError, Outcome, Sweep, SweepTraining, SweepVariant
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import require_whole_export
from vlmpipe.trainer.storage.records import read_record, write_record

pytestmark = pytest.mark.timeout(300)
STEPS = 4


def add(root: Path, variant: str, train: dict[str, Any]) -> JobConfig:
    return make_run(root, f"sweep/variants/{variant}/0", changed(**train))


def changed(**train: Any) -> dict[str, Any]:
    fields = {f"train.{name}": value for name, value in {"max_steps": STEPS, "micro_batch_size": 8, **train}.items()}
    return {**fields, "evaluate.max_samples": 8}


def write_sweep(root: Path, jobs: list[JobConfig], *, without_data: str = "") -> str:
    """Write a sweep of one job with these trainings, which share the first one's data. Returns its folder."""
    first = jobs[0].run.run_uri

    def training(job: JobConfig) -> SweepTraining:
        leader = job.run.run_uri if job.run.run_uri == without_data else first
        variant = job.run.run_id.split("/")[2]
        return SweepTraining(variant=variant, start=0, run_uri=job.run.run_uri, data_from=leader, features_from=leader)

    trainings = tuple(training(job) for job in jobs)
    store = open_storage(str(root / "runs/sweep"))
    Sweep(
        metric="exact_match",
        baseline=trainings[0].variant,
        starts=1,
        parallelism=1,
        variants=tuple(SweepVariant(name=one.variant) for one in trainings),
        trainings=trainings,
        jobs=(tuple(range(len(jobs))),),
    ).write(store)
    write_record(store, "run.json", {"secrets": {}})
    return store.root_uri


def start(sweep: str, processes: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlmpipe.trainer.trials.sweep", "--config", f"{sweep}/{Sweep.FILE}", "--job", "0"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(sweep: str, processes: int = 1, *, job: int = 0) -> tuple[int, str]:
    """Exit code of the job, and what it printed. One of a process is forked from the preloaded one."""
    if processes == 1:
        arguments = ["--config", f"{sweep}/{Sweep.FILE}", "--job", str(job), "--nproc-per-node", "1"]
        (code,), (said,) = ends_of_ranks("vlmpipe.trainer.trials.sweep", arguments, processes=1)
        return code, said
    process = start(sweep, processes)
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


def outcome(job: JobConfig) -> Outcome:
    return Outcome.read(open_storage(job.run.run_uri))


def test_trainings_of_a_job_and_what_is_left_of_them(tmp_path: Path) -> None:
    alone = make_run(tmp_path, "alone", changed())
    encode_features(alone)
    train_runs([alone], processes=1)
    plain = add(tmp_path, "plain", {})
    other = add(tmp_path, "other", {"seed": 5})
    frozen = {"model.freeze": ["tower", "projector", "language_model"]}
    wrong = make_run(tmp_path, "sweep/variants/wrong/0", changed() | frozen)
    untrained = add(tmp_path, "untrained", {"epochs": 0})
    dataless = add(tmp_path, "dataless", {})
    store = open_storage(dataless.run.run_uri)
    store.delete("prepared.json")
    write_record(store, "steps/prepare-data.json", {"detail": {"error": "no image could be read"}})
    sweep = write_sweep(tmp_path, [plain, wrong, untrained, dataless, other], without_data=dataless.run.run_uri)

    code, said = finish(sweep)
    assert code == 0, said
    states = {job.run.run_id.split("/")[2]: outcome(job) for job in (plain, wrong, untrained, dataless, other)}
    assert {name: one.state for name, one in states.items()} == {
        "plain": "done", "wrong": "failed", "untrained": "done", "dataless": "failed", "other": "done"
    }, said  # fmt: skip
    assert states["dataless"].error == "its data could not be prepared: no image could be read"
    assert "leaves nothing to train" in states["wrong"].error
    # One process after the other changes nothing: losses are those of a run of its own, to the bit.
    assert losses(plain) == losses(alone)
    assert losses(other) != losses(alone)
    # What trained nothing has the first weights, and its evaluation like the others.
    first, trained = (require_whole_export(open_storage(job.run.run_uri)) for job in (untrained, plain))
    assert (first["step"], trained["step"]) == (0, STEPS)
    assert first["weights_sha256"] != trained["weights_sha256"]
    assert read_record(open_storage(untrained.run.run_uri), "evaluate.json")["questions"] > 0
    record = read_record(open_storage(sweep), "steps/train-variants-0.json")
    assert (record["state"], record["done"], record["message"]) == ("done", 5, "5 trainings, 2 failed")
    assert {"train_s", "export_s", "evaluate_s"} <= states["plain"].as_json().keys()

    # Started again, it goes on with what is not done.
    with_data = add(tmp_path, "dataless", {})
    code, said = finish(sweep)
    assert code == 0, said
    assert outcome(plain) == states["plain"]
    assert outcome(with_data).state == "done"
    assert outcome(wrong).state == "failed"


@pytest.mark.slow
def test_a_job_of_two_processes_a_training_ends_well_and_trains_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    job = add(tmp_path, "plain", {})
    encode_features(job)
    sweep = write_sweep(tmp_path, [job])
    code, said = finish(sweep, processes=2)
    assert code == 0 and (outcome(job).state, summary(job)["world_size"]) == ("done", 2), said
    first = outcome(job)
    code, said = finish(sweep)
    assert code == 0 and "done before" in said and outcome(job) == first
    store = open_storage(job.run.run_uri)
    content = read_record(store, "run.json")
    never = {"train": content["train"] | {"resume": "never"}}
    write_record(store, "run.json", content | never | {"run": content["run"] | {"submission": "second"}})
    for _ in range(2):  # the second, a job that is restarted within this submission of the sweep repeats nothing
        code, said = finish(sweep)
        assert code == 0, said
    assert "done before" in said and outcome(job).started_s > first.ended_s
    FeaturesError(error="no machines").write(store)
    write_record(store, "run.json", content | never | {"run": content["run"] | {"submission": "third"}})
    finish(sweep)
    assert outcome(job).error == "the images of its data could not be encoded: no machines"


@pytest.mark.slow
def test_a_job_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    long = {"max_steps": 40, "epochs": 20, "checkpoint_every_steps": 10}
    uninterrupted = make_run(tmp_path, "alone", changed(**long))
    encode_features(uninterrupted)
    train_runs([uninterrupted], processes=1)
    stopped = add(tmp_path, "stopped", long)
    sweep = write_sweep(tmp_path, [stopped])
    process = start(sweep)
    log, ends_s = Path(stopped.run.run_uri, "metrics.jsonl"), time.monotonic() + 120
    while not (log.exists() and log.read_text(encoding="utf-8").count("\n") > 5):
        assert process.poll() is None and time.monotonic() < ends_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert not Path(stopped.run.run_uri, Outcome.FILE).exists()
    code, said = finish(sweep)
    assert code == 0 and "continu" in said, said
    assert losses(stopped)[-1] == losses(uninterrupted)[-1]


def test_a_job_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    job = add(tmp_path, "plain", {})
    sweep = write_sweep(tmp_path, [job])
    code, said = finish(sweep, job=3)
    assert code == 64 and "--job is 3" in said
