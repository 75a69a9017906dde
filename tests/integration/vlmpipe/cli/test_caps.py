"""`vlmpipe submit` under the caps of a server of tools, with Google's client against a strict server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.vertex.server import FakeVertex
from tests.support.paths import ROOT
from tests.support.vertex.submit_runs import CHEAP, DEAR, Submit, running_vertex, submitter
from vlmpipe.planner.spending.ledger import entries
from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.confinement.limits import Limits
from vlmpipe.trainer.errors import ExitCode


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture
def vlmpipe_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    return submitter(tmp_path, monkeypatch, capfd)


@pytest.fixture
def caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    (tmp_path / "ledger").touch()
    caps = Limits(str(ROOT), str(tmp_path / "ledger"), 30.0, 50.0, ("gs://example-bucket",))
    monkeypatch.setenv(LIMITS_VARIABLE, caps.to_json())
    return caps


def test_a_run_above_the_cap_is_not_sent_whatever_it_says_itself(
    vertex: FakeVertex, vlmpipe_submit: Submit, caps: Limits
) -> None:
    answer = vlmpipe_submit("plan.confirm_above_usd=100000", "--yes", "--json", plan=DEAR)
    assert answer.code == answer.json["error"]["exit_code"] == ExitCode.NO_PERMISSION
    assert "may cost $412.00, more than a call may" in answer.json["error"]["found"]
    assert vertex.jobs == {} and entries(caps.ledger) == []


def test_runs_are_sent_until_they_reach_the_cap_together(
    vertex: FakeVertex, vlmpipe_submit: Submit, caps: Limits
) -> None:
    codes = [vlmpipe_submit(f"train.epochs={epochs}", "--json", plan=CHEAP).code for epochs in (1, 2, 3)]
    assert codes == [0, 0, ExitCode.NO_PERMISSION]
    assert (len(vertex.jobs), [entry.usd for entry in entries(caps.ledger)]) == (2, [20.0, 20.0])


def test_a_run_of_unknown_cost_is_not_sent(vertex: FakeVertex, vlmpipe_submit: Submit, caps: Limits) -> None:
    unknown = replace(CHEAP, usd=None, unknown="no price of a4x-highgpu-4g")
    answer = vlmpipe_submit("--yes", "--json", plan=unknown)
    assert "not wholly known: no price of a4x-highgpu-4g" in answer.json["error"]["found"]
    assert vertex.jobs == {} and entries(caps.ledger) == []


@pytest.mark.usefixtures("caps")
def test_a_dry_run_is_shown_and_a_bucket_that_is_not_listed_is_refused(
    vertex: FakeVertex, vlmpipe_submit: Submit
) -> None:
    assert vlmpipe_submit("--dry-run", "--json", plan=DEAR).json["sent"] is False
    answer = vlmpipe_submit("gcp.pipeline_root=gs://others/vlmpipe", "--json", plan=CHEAP)
    assert {problem["field"] for problem in answer.json["error"]["problems"]} == {"gcp.pipeline_root"}
    assert vertex.jobs == {}
