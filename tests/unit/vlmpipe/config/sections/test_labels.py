"""Labels of a run file are labels on every service that gets them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.fakes.kubernetes.pod_rules import LABEL_KEY as KUBERNETES_KEY
from tests.fakes.kubernetes.pod_rules import LABEL_VALUE as KUBERNETES_VALUE
from vlmpipe.config.sections.gcp import GcpConfig
from vlmpipe.config.sections.labels import ADDED, MAX_LABELS, require_labels
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.pipelines.submit_job import _labels
from vlmpipe.platforms.vertex.pipeline_job import SUBMISSION_LABEL
from vlmpipe.platforms.vertex.schedules import DIGEST_LABEL, SCHEDULE_LABEL
from vlmpipe.rehearsal.vertex.rules import check_labels
from vlmpipe.trainer.errors import ConfigError

LETTERS = st.text(alphabet="az09-_Aé. ", max_size=65)


@given(key=LETTERS, value=LETTERS)
def test_what_the_run_file_takes_every_service_takes(key: str, value: str) -> None:
    try:
        labels = GcpConfig(labels={key: value}).labels
    except ValidationError:
        return
    check_labels(labels)
    assert KUBERNETES_KEY.fullmatch(key) and KUBERNETES_VALUE.fullmatch(value)
    require_labels(labels)


@pytest.mark.parametrize(
    ("key", "value"),
    [("", "a"), ("1a", "b"), ("Team", "b"), ("a", "B"), ("a", "b."), ("a" * 64, "b"), ("a", "b" * 64), ("a", "b-")],
)
def test_what_a_service_refuses_is_refused_before_anything_is_sent(key: str, value: str) -> None:
    with pytest.raises(ValidationError, match="labels"):
        GcpConfig(labels={key: value})


@pytest.mark.parametrize("value", ["", "vision", "a_b-1", "b" * 63])
def test_good_labels_are_taken(value: str) -> None:
    assert GcpConfig(labels={"team": value}).labels == {"team": value}


def test_there_is_room_for_what_is_added() -> None:
    added = {STEP_LABEL, SUBMISSION_LABEL, SCHEDULE_LABEL, DIGEST_LABEL, "vertex-ai-pipelines-run-billing-id"}
    assert len(added) == ADDED
    labels = {f"k{number}": "v" for number in range(MAX_LABELS)}
    check_labels({**GcpConfig(labels=labels).labels, **dict.fromkeys(added, "v")})
    with pytest.raises(ValidationError, match="at most 59 items"):
        GcpConfig(labels={**labels, "one-more": "v"})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"Team": "a"}, "Team=a"),
        ({"team": "Vision"}, "team=Vision"),
        ({"1": "a"}, "1=a"),
        ({"a": "b" * 64}, "at most 63"),
        ({f"k{number}": "v" for number in range(65)}, "65 are given"),
    ],
)
def test_labels_of_a_job_file_are_those_that_vertex_takes(labels: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        _labels(labels)  # as `submit --job-spec` takes them
    require_labels({"équipe": "été", "team": ""})
