"""Whether an earlier pipeline job of a run's folder still runs, asked of each service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.kubernetes.api import FakeKubernetes
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.runs import JOB, course
from vlmpipe.components.runtime.folder_lock import OVER, RUNNING, Holder
from vlmpipe.components.runtime.job_states import state_of_job, this_job
from vlmpipe.records.compiled import CompiledSettings
from vlmpipe.rehearsal.vertex.scripted_runs import DONE, TRAINING
from vlmpipe.trainer.errors import UserError

pytest_plugins = ("tests.support.vertex.fixtures",)


def compiled(target: str, **gcp: str) -> str:
    return CompiledSettings(target=target, root_uri="gs://bucket", fixed={}, run_file={"gcp": dict(gcp)}).text()


def test_a_job_on_vertex_ai_is_over_when_the_service_says_so(started: FakeVertex) -> None:
    mine = this_job(compiled("vertex", project="test-project", location="us-central1"), JOB)
    course(started, *TRAINING, begun=len(TRAINING))
    assert state_of_job(mine) == RUNNING
    course(started, *DONE, begun=len(DONE))
    assert state_of_job(mine) == OVER
    with pytest.raises(UserError, match="no run"):
        state_of_job(Holder("another", "vertex", mine.project, mine.location))


def test_a_job_on_kubeflow_is_over_when_its_workflow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        mine = this_job(compiled("kubeflow"), "training-x1")
        assert mine.namespace == cluster.namespace
        for phase, state in {"": RUNNING, "Running": RUNNING, "Succeeded": OVER, "Failed": OVER, "Error": OVER}.items():
            cluster.workflows["training-x1"] = phase
            assert state_of_job(mine) == state, phase
        del cluster.workflows["training-x1"]
        assert state_of_job(mine) == OVER, "cleared away after its end"
        cluster.faults = [("GET", 503)]
        with pytest.raises(UserError, match="503"):
            state_of_job(mine)
        cluster.allowed.discard("get workflows")
        with pytest.raises(UserError, match="not allowed to look at the workflow"):
            state_of_job(mine)


def test_a_record_without_a_place_is_not_guessed() -> None:
    with pytest.raises(UserError, match="does not say where"):
        state_of_job(Holder("training-x1", "kubeflow"))
