"""What --inject-fault takes and what follows from it, and how far a restart budget goes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines import local_runner as local
from vlmpipe.platforms.jobs.job_failure import PERMANENT
from vlmpipe.platforms.local.jobs.fault_spec import EXAMPLES, Event, parse_faults, random_events
from vlmpipe.platforms.local.jobs.restart_policy import (
    PLATFORM,
    Budget,
    RestartPolicy,
    restart_policy,
)
from vlmpipe.platforms.local.process import pipeline_command
from vlmpipe.platforms.step_context import FAULTS_VARIABLE, RETRIES_VARIABLE
from vlmpipe.runs.folders.fault_summary import fault_lines, read_faults
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.run import LocalRun
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.errors import CAUSES, ConfigError, ExitCode


def parse(*texts: str, nodes: int = 2, ranks_per_node: int = 2) -> list[Event]:
    return parse_faults(texts, nodes=nodes, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("preempt:node=1,after_step=20,notice=5s", Event("preempt", 20, node=1, notice_s=5)),
        ("preempt:node=0,after_step=2", Event("preempt", 2, node=0, notice_s=30)),
        ("kill:rank=3,after_step=7", Event("kill", 7, rank=3)),
        ("kill:node=1,after_step=0,delay=1.5s", Event("kill", 0, node=1, delay_s=1.5)),
        ("stop:for=2s, after_step=3, node=1", Event("stop", 3, node=1, for_s=2)),
    ],
)
def test_an_event_is_read_and_written(text: str, event: Event) -> None:
    assert parse(text) == [event]
    assert parse(str(event)) == [event]


def test_several_events_come_in_the_order_in_which_they_are_due() -> None:
    events = parse("kill:rank=0,after_step=9; kill:node=0,after_step=3", "stop:node=1,after_step=5,for=1s")
    assert [event.after_step for event in events] == [3, 5, 9]


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("", "an event of --inject-fault is empty", EXAMPLES["kill"]),
        ("kil:rank=0,after_step=1", "'kil' is no kind of event", EXAMPLES["random"]),
        ("kill", "rank or node is missing", EXAMPLES["kill"]),
        ("kill:rank=0,node=1,after_step=1", "rank and node are given", EXAMPLES["kill"]),
        ("kill:rank=0", "after_step is missing", EXAMPLES["kill"]),
        ("kill:rank=4,after_step=1", "training has no rank 4", "rank=0 to 3"),
        ("preempt:node=2,after_step=1", "training has no node 2", "node=0 to 1"),
        ("preempt:rank=0,after_step=1", "'rank=0' is nothing that preempt takes", "node=..., after_step=..."),
        ("preempt:node=1,after_step=1,notice=60s", "notice is '60s'", "seconds, 0s to 30s"),
        ("preempt:node=1,after_step=1,notice=5", "notice is '5'", "seconds, 0s to 30s"),
        ("stop:node=1,after_step=1", "for is missing", EXAMPLES["stop"]),
        ("kill:rank=-1,after_step=1", "rank is '-1'", "a whole number of at least 0"),
        ("kill:rank=0,after_step=1,after_step=2", "after_step is given twice", EXAMPLES["kill"]),
        ("random:seed=1,every_steps=0,count=2", "every_steps is '0'", "a whole number of at least 1"),
        ("random:seed=1", "every_steps is missing", EXAMPLES["random"]),
    ],
)
def test_an_invalid_event_is_refused_with_the_expected_form(text: str, found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert found in caught.value.found and expected in caught.value.expected


@given(
    seed=st.integers(0, 1 << 40),
    every=st.integers(1, 50),
    count=st.integers(1, 20),
    nodes=st.integers(1, 5),
    ranks=st.integers(1, 8),
)
def test_random_events_are_a_function_of_the_seed_and_each_falls_in_its_own_span_of_steps(
    seed: int, every: int, count: int, nodes: int, ranks: int
) -> None:
    text = f"random:seed={seed},every_steps={every},count={count}"
    events = parse(text, nodes=nodes, ranks_per_node=ranks)
    assert events == parse(text, nodes=nodes, ranks_per_node=ranks)
    assert [(event.after_step - 1) // every for event in events] == list(range(count))
    for event in events:
        assert parse(str(event), nodes=nodes, ranks_per_node=ranks) == [event], "what is drawn can also be ordered"


def test_another_seed_gives_other_events() -> None:
    drawn = {str(random_events(seed=seed, every_steps=9, count=5, nodes=2, ranks_per_node=2)) for seed in range(20)}
    assert len(drawn) == 20


def test_random_events_of_a_known_seed_stay_what_they_are() -> None:
    """A soak is repeated by its seed, on other machines and later versions too."""
    events = random_events(seed=7, every_steps=15, count=4, nodes=2, ranks_per_node=1)
    assert [str(event) for event in events] == KNOWN


KNOWN = [
    "preempt:node=0,after_step=6,notice=5s,delay=0.06s",
    "kill:rank=0,after_step=22,delay=0.83s",
    "preempt:node=0,after_step=36,notice=5s,delay=0.98s",
    "kill:rank=1,after_step=50,delay=0.82s",
]


@dataclass(frozen=True)
class Scheduling:
    restart_job_on_worker_restart: bool = True
    disable_retries: bool = False


def test_without_being_asked_nothing_is_started_again() -> None:
    assert not restart_policy(Scheduling(), {}).restarts


def test_injected_faults_imply_the_platforms_budget_unless_retries_are_given() -> None:
    faults = {"VLMPIPE_FAULTS": "kill:rank=0,after_step=1"}
    assert restart_policy(Scheduling(), faults) == RestartPolicy(5, 3, 6, whole_job=True)
    assert restart_policy(Scheduling(), {**faults, "VLMPIPE_LOCAL_RETRIES": "0"}).restarts is False
    assert restart_policy(Scheduling(False), {"VLMPIPE_LOCAL_RETRIES": "2"}) == RestartPolicy(2, 0, 2)


def test_disable_retries_leaves_only_restarts_in_place() -> None:
    policy = restart_policy(Scheduling(disable_retries=True), {"VLMPIPE_FAULTS": "x"})
    assert policy == RestartPolicy(worker_restarts=5, whole_job=False)


def test_a_wrong_number_of_retries_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLMPIPE_LOCAL_RETRIES is 'many'"):
        restart_policy(Scheduling(), {"VLMPIPE_LOCAL_RETRIES": "many"})


@given(st.integers(0, 6), st.integers(0, 4), st.booleans())
def test_a_replica_that_always_fails_is_started_as_often_as_its_restarts_times_the_jobs_retries(
    restarts: int, retries: int, whole_job: bool
) -> None:
    budget = Budget(RestartPolicy(restarts, retries, 0, whole_job))
    starts = 1
    while budget.spend(["a"]):
        starts += 1
    assert starts == (1 + restarts) * (1 + retries)


def test_each_replica_has_its_own_restarts_and_a_retry_of_the_job_is_for_all() -> None:
    budget = Budget(RestartPolicy(worker_restarts=1, job_retries=1))
    spent = [budget.spend(fallen) for fallen in (["a"], ["b"], ["a"], ["a", "b"], ["b"])]
    assert [one and one.replicas for one in spent] == [("a",), ("b",), (), ("a", "b"), None]
    assert spent[2] and spent[2].whole_job and spent[2].budget == "retry 1 of 1 of the job"


def test_when_all_restart_together_only_the_cause_is_charged() -> None:
    budget = Budget(RestartPolicy(worker_restarts=1, whole_job=True))
    first, second, third = (budget.spend(fallen) for fallen in (["a", "b"], ["b", "a"], ["a", "b"]))
    assert first and second and first.whole_job and second.whole_job
    assert third is None


def test_reclaimed_machines_are_charged_to_a_budget_of_their_own() -> None:
    budget = Budget(PLATFORM)
    spent = [budget.spend(["a"], reclaimed=True) for _ in range(7)]
    assert [one is not None for one in spent] == [True] * 6 + [False]
    assert budget.spend(["a"]) is not None, "the replica's own restarts are untouched"


def test_a_named_cause_is_permanent_but_a_stall_or_a_preemption_is_not() -> None:
    assert {ExitCode.STALLED} == CAUSES - PERMANENT
    assert not {0, 1, ExitCode.PREEMPTED, 137, 143} & PERMANENT


def test_the_report_counts_what_happened_in_this_attempt_and_what_did_not(tmp_path: Path) -> None:
    lines = [
        {"event": "kill", "time_s": 1, "faults": "of an earlier attempt"},
        {"event": "preempt", "time_s": 10},
        {"event": "restart", "time_s": 11, "steps_repeated": 0},
        {"event": "kill", "time_s": 12},
        {"event": "preempt", "time_s": 13},
        {"event": "restart", "time_s": 14, "steps_repeated": 31},
        {"event": "missed", "time_s": 15, "faults": "kill:rank=0,after_step=99"},
    ]
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fault_lines(read_faults(tmp_path, since_s=5), survived=True) == [
        "survived 2 preemptions, 1 kill: 2 restarts, at least 31 steps made twice (faults.jsonl)",
        "did not happen: kill:rank=0,after_step=99",
    ]
    assert fault_lines(read_faults(tmp_path, since_s=13), survived=False)[0].startswith("met 1 preemption: 1 restart,")
    assert read_faults(tmp_path / "elsewhere", since_s=0) == []


def test_the_command_line_refuses_a_wrong_event_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "configs/digits.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["vlmpipe", "run", str(config), "--inject-fault", "kill:node=2,after_step=1"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == ExitCode.CONFIG
    assert "training has no node 2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_faults_and_retries_reach_the_steps_by_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str | None] = {}

    def run_local(_config: object, *, run_id: str) -> int:
        seen.update({name: os.environ.get(name) for name in (FAULTS_VARIABLE, RETRIES_VARIABLE)})
        return 0

    monkeypatch.setattr(local, "run_local", run_local)
    for name in (FAULTS_VARIABLE, RETRIES_VARIABLE):
        monkeypatch.setenv(name, "of whoever started this")
    marker = Marker("r", "digest", (), 0.0)
    run = LocalRun(tmp_path, marker, None, lock=0)
    config = load_run_file(ROOT / "configs/digits.yaml")
    (tmp_path / RUN_FILE_COPY).write_text(json.dumps(config.to_dict()))
    events = ["kill:rank=0,after_step=1", "kill:rank=1,after_step=2"]

    assert local.main(pipeline_command(run, retries=2, faults=events)[3:]) == 0
    assert seen == {FAULTS_VARIABLE: ";".join(events), RETRIES_VARIABLE: "2"}
    assert local.main(pipeline_command(run)[3:]) == 0
    assert seen == {FAULTS_VARIABLE: None, RETRIES_VARIABLE: None}
