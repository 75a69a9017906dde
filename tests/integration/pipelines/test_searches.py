"""How a search stands: on Vertex AI, by its id, and here, by its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.aiplatform_v1 import types as api

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.search_runs import DIGITS, PRECISION, RATE, ROWS, config, opened
from tests.support.vertex.submit_runs import APPROVED, Submit, commander
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.pipelines.tune.search import Search, SearchStoppedError, request_of, run_search, unfinished_search
from vlmpipe.platforms.local.jobs import job as local_job
from vlmpipe.runs.submitted import RunRecord
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.monitoring.hypertune import METRIC_FILE_VARIABLE, TRIAL_VARIABLE


@pytest.fixture
def search(tmp_path: Path) -> Search:
    """A search from a run that has trained."""
    return opened(config(algorithm="RANDOM_SEARCH"), tmp_path)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    """One for Vertex AI, in a bucket."""
    with FakeGcs(buckets=["team"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        yield opened(config(algorithm="RANDOM_SEARCH"), "gs://team/vlmpipe")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    monkeypatch.setattr(retries, "RETRY", Retry(initial=0.01, maximum=0.05, timeout=5.0))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        yield running


@pytest.fixture
def vlmpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    monkeypatch.setattr("vlmpipe.runs.watch.SERVICE_POLL_S", 0.0)
    return commander(tmp_path, monkeypatch, capfd)


def trial(number: int, state: str, metric: float | None = None, reason: str = "") -> api.Trial:
    """As the service tells of one, with a value for each of PARAMETERS."""
    measured = [] if metric is None else [{"metric_id": "exact_match", "value": metric}]
    values = {RATE: 1e-3 * number, ROWS: 2.0, PRECISION: "bf16"}
    return api.Trial(
        id=str(number),
        state=state,
        parameters=[{"parameter_id": name, "value": value} for name, value in values.items()],
        final_measurement={"metrics": measured},
        infeasible_reason=reason,
    )


def test_a_search_on_vertex_is_watched_by_its_id_and_shows_the_best_trial_first(
    server: FakeVertex, sent: Search, vlmpipe: Submit
) -> None:
    name = request_of(sent).send(APPROVED)
    RunRecord(name, sent.uri, 1.0, 30.0).write(sent.search_id)
    whole = [trial(1, "SUCCEEDED", 0.4), trial(2, "SUCCEEDED", 0.7), trial(3, "INFEASIBLE", reason="exit code 1")]
    server.tuning_jobs.moves = [
        ("RUNNING", []),
        ("RUNNING", [trial(1, "SUCCEEDED", 0.4), trial(2, "ACTIVE")]),
        ("SUCCEEDED", whole),
    ]
    answer = vlmpipe("status", sent.search_id, "--watch", "--plain")
    assert answer.code == 0
    assert "trial-1: done 0.0 s. exact_match 0.4000, train.optimizer.learning_rate=0.001" in answer.out
    lines = [line.split()[:2] for line in answer.out.split("ended", 1)[1].splitlines()[2:5]]
    assert lines == [["2", "0.7000"], ["1", "0.4000"], ["3", "failed:"]]
    assert f"training/{name.rpartition('/')[2]}?project=test-project" in answer.out
    for known in (sent.search_id, name):
        found = vlmpipe("status", known, "--json").json
        assert (found["outcome"], found["exit_code"], found["trials"][0]["metric"]) == ("done", 0, 0.7)
        assert found["trials"][0]["values"] == {RATE: 2e-3, ROWS: 2.0, PRECISION: "bf16"}
    over = vlmpipe("cancel", sent.search_id)
    assert (over.code, "nothing to cancel" in over.err) == (64, True)
    assert (vlmpipe("logs", sent.search_id).code, vlmpipe("diagnose", sent.search_id).code) == (64, 64)


def test_a_search_on_vertex_is_cancelled_once(server: FakeVertex, sent: Search, vlmpipe: Submit) -> None:
    name = request_of(sent).send(APPROVED)
    server.faults.append(Fault("drop_after", method="POST"))
    assert vlmpipe("cancel", name).code == 0
    again = vlmpipe("cancel", name, "--json")
    assert (again.code, again.json["asked"]) == (0, False)
    answer = vlmpipe("status", name, "--watch", "--json")
    assert (answer.code, answer.json["outcome"]) == (75, "stopped")
    assert sum(":cancel" in request for request in server.requests) == 2  # the first answer was lost
    missing = vlmpipe("status", name.replace("/5001", "/5002"))
    assert (missing.code, "does not exist" in missing.err) == (64, True)


def test_a_search_here_is_read_from_its_table(
    search: Search, vlmpipe: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(name: str, spec: dict[str, Any], **_settings: Any) -> None:
        seen.append(vlmpipe("status", search.search_id, "--root", str(tmp_path), "--json").json)
        if len(seen) == 2:
            raise UserError("training is not finite")
        env = {one["name"]: one["value"] for one in spec["worker_pool_specs"][0]["container_spec"]["env"]}
        Path(env[METRIC_FILE_VARIABLE]).parent.mkdir(parents=True)
        Path(env[METRIC_FILE_VARIABLE]).write_text(json.dumps({"exact_match": str(len(seen) / 10)}), encoding="utf-8")

    monkeypatch.setattr(local_job, "run_job", run)
    run_search(search)
    assert [(one["outcome"], len(one["trials"])) for one in seen] == [("running", number) for number in range(6)]
    found = vlmpipe("status", search.uri, "--json").json
    assert (found["outcome"], [one["trial"] for one in found["trials"]]) == ("done", [6, 5, 4, 3, 1, 2])
    said = vlmpipe("status", search.uri).out
    assert said.startswith(f"search {search.search_id}: done, 6 of 6 trials ended\n")
    assert "failed: training is not finite" in said
    (Path(search.uri) / "trials.json").write_text("[]")
    assert vlmpipe("status", search.uri, "--json").json["outcome"] == "stopped"
    assert "is over" in vlmpipe("cancel", search.uri).err


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), UserError("stopped on request", code=ExitCode.PREEMPTED)])
def test_a_stop_ends_a_search_here_and_it_is_continued(
    stop: BaseException, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run(name: str, spec: dict[str, Any], **_settings: Any) -> None:
        env = {one["name"]: one["value"] for one in spec["worker_pool_specs"][0]["container_spec"]["env"]}
        started.append(int(env[TRIAL_VARIABLE]))
        if started == [1, 2]:
            raise stop
        Path(env[METRIC_FILE_VARIABLE]).parent.mkdir(parents=True, exist_ok=True)
        Path(env[METRIC_FILE_VARIABLE]).write_text('{"exact_match": "0.5"}', encoding="utf-8")

    monkeypatch.setattr(local_job, "run_job", run)
    assert unfinished_search(search, str(tmp_path)) == search.search_id, "it has not begun"
    with pytest.raises(SearchStoppedError, match="1 of 6 trials had ended") as stopped:
        run_search(search)
    assert stopped.value.code == ExitCode.INTERRUPTED
    assert unfinished_search(search, str(tmp_path)) == search.search_id
    changed = opened(config(algorithm="RANDOM_SEARCH", seed=4), tmp_path, "digits-tune-2")
    assert unfinished_search(changed, str(tmp_path)) == "digits-tune-2", "one of other settings is another search"
    assert len(run_search(search)) == 6
    assert started == [1, 2, 2, 3, 4, 5, 6]
    assert unfinished_search(search, str(tmp_path)) == ""


def test_tune_asks_for_the_run_that_it_starts_from(vlmpipe: Submit) -> None:
    answer = vlmpipe("tune", str(DIGITS))
    assert answer.code == ExitCode.CONFIG and "add --from RUN" in answer.err
