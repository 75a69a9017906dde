"""A benchmark of parts: budget, failures and what it prints."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support import suite as suite_module
from benchmarks.support.processes import announce, call
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench, Part, Suite, cases_in_time
from tests.support.clock import replace_time

pytestmark = pytest.mark.slow  # benchmarks are no laws
ENTRY_POINTS = ("bench_data", "bench_train", "bench_planner", "bench_checkpoint", "on_gpu")


@dataclass(frozen=True)
class Stub(Part):
    """A part whose function is given."""

    function: Callable[[Bench], None] = field(default=lambda _bench: None)

    def load(self) -> Callable[[Bench], None]:
        return self.function


class Clock:
    """A clock that only moves when somebody works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    replace_time(monkeypatch, suite_module, monotonic=stopped)
    return stopped


def part(name: str, function: Callable[[Bench], None], seconds: float = 60) -> Stub:
    return Stub(name, "", seconds, f"what {name} does", function=function)


def rounds_of(clock: Clock, seconds: float, counts: list[int], comparisons: int = 1) -> Callable[[Bench], None]:
    """Comparisons of one side, each of whose rounds takes so long."""

    def side() -> float:
        clock.now_s += seconds
        return seconds

    def run(bench: Bench) -> None:
        bench.expect(comparisons)
        for _ in range(comparisons):
            counts.append(len(bench.take_turns("work", {"side": side}, warm_up=False)["side"]))

    return run


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_default_run_fits_its_ten_minutes(name: str) -> None:
    suite: Suite = importlib.import_module(f"benchmarks.{name}").SUITE
    assert sum(each.seconds for each in suite.parts if each.default) <= 600


def test_rounds_end_with_the_parts_share_of_the_time(clock: Clock) -> None:
    counts: dict[str, list[int]] = {"first": [], "second": []}
    parts = [part(name, rounds_of(clock, 20, counts[name])) for name in counts]
    assert Suite("test", parts, rounds=99).main(None, ["--budget", "2"]) == 0
    assert counts == {"first": [3], "second": [3]}  # a minute each


def test_comparisons_of_a_part_share_its_time(clock: Clock) -> None:
    counts: list[int] = []
    assert Suite("test", [part("one", rounds_of(clock, 50, counts, comparisons=4))], rounds=99).main(None, []) == 0
    assert counts == [3, 3, 3, 3]  # 600 seconds


def test_two_rounds_are_made_however_short_the_time(clock: Clock) -> None:
    counts: list[int] = []
    Suite("test", [part("one", rounds_of(clock, 50, counts))]).main(None, ["--budget", "0.1"])
    assert counts == [2]


def test_a_part_that_the_time_does_not_reach_is_left_out_and_said(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: list[int] = []
    parts = [part("slow", rounds_of(clock, 100, counts)), part("late", rounds_of(clock, 1, counts))]
    assert Suite("test", parts).main(None, ["--budget", "1"]) == 0
    assert counts == [2]
    printed = " ".join(capsys.readouterr().out.split())
    assert "slow: work, 2 of 7 rounds; late was left out" in printed


def test_rounds_that_are_asked_for_are_made_whatever_they_take(clock: Clock) -> None:
    counts: list[int] = []
    Suite("test", [part("one", rounds_of(clock, 1000, counts))]).main(None, ["--rounds", "5"])
    assert counts == [5]


@pytest.mark.parametrize("count", [1, 2, 10, 101])
def test_cases_are_all_run_where_there_is_time_and_come_from_everywhere_where_there_is_not(
    count: int, clock: Clock
) -> None:
    names = [str(number) for number in range(count)]
    assert sorted(cases_in_time(names, 1e9)) == sorted(names)
    some = []
    for name in cases_in_time(names, 30.0):
        some.append(int(name))
        clock.now_s += 10
    assert len(some) == min(count, 3)
    if count > 10:
        assert max(some) - min(some) > count / 10


def test_a_part_that_fails_leaves_the_figures_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(bench: Bench) -> None:
        bench.report.figure("half", "", "s", Side("ours", [1.0]))
        raise ValueError("broken")

    def unfair(bench: Bench) -> None:
        bench.report.figure("unfair", "", "s", Side("ours", [1.0]))
        bench.report.require(False, "the same losses")

    def works(bench: Bench) -> None:
        bench.report.figure("whole", "", "s", Side("ours", [2.0, 3.0]))

    parts = [part("fails", fails), part("unfair", unfair), part("works", works)]
    assert Suite("test", parts).main(None, ["--json", str(tmp_path / "a.json")]) == 1
    content = json.loads((tmp_path / "a.json").read_text())
    assert [row["claim"] for row in content["rows"]] == ["half", "whole"], "an unfair comparison gives no figure"
    assert any("fails failed: broken" in note for note in content["notes"])
    assert "ValueError: broken" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_prints_what_it_has_and_leaves_no_scratch(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(bench: Bench) -> None:
        (bench.scratch / "data").write_text("much")
        bench.report.figure("whole", "", "s", Side("ours", [2.0, 3.0]))
        bench.take_turns("more", {"ours": partial(os.kill, os.getpid(), number)})

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    (tmp_path / "scratch").mkdir()
    parts = [part("stopped", stopped), part("late", rounds_of(Clock(), 1, []))]
    arguments = ["--json", str(tmp_path / "a.json"), "--folder", str(tmp_path / "scratch")]
    assert Suite("test", parts).main(None, arguments) == 130
    content = json.loads((tmp_path / "a.json").read_text())
    assert [row["claim"] for row in content["rows"]] == ["whole"]
    said = "Interrupted in stopped: what it was comparing, and the parts after it, are missing; "
    said += "--only stopped late measures them."
    assert content["notes"] == [said]
    assert said in " ".join(capsys.readouterr().out.split())
    assert not list((tmp_path / "scratch").iterdir())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


class EndsWithASignal:
    """Something whose finalizer runs while the signal comes: Python drops what is raised in it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_is_stopped_although_python_drops_the_interrupt() -> None:
    def stopped(_bench: Bench) -> None:
        EndsWithASignal()
        for _ in range(40):
            time.sleep(0.05)
        pytest.fail("the part ran to its end")

    hook = sys.unraisablehook
    assert Suite("test", [part("stopped", stopped)]).main(None, []) == 130
    assert sys.unraisablehook is hook


def sleeps_for_an_hour() -> None:
    announce(f"{os.getpid()} {tempfile.mkdtemp()}")
    time.sleep(3600)


def test_a_run_that_is_stopped_stops_its_processes_and_removes_their_temporary_files(tmp_path: Path) -> None:
    started: list[str] = []

    def waits(bench: Bench) -> None:
        def stop_at(process: str) -> None:
            started.extend(process.split())
            os.kill(os.getpid(), signal.SIGTERM)

        call(f"{__name__}:sleeps_for_an_hour", {}, at=stop_at)

    assert Suite("test", [part("waits", waits)]).main(None, ["--folder", str(tmp_path)]) == 130
    process, temporary = started
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
    assert not Path(temporary).exists()


def test_only_and_list_name_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    run: list[str] = []
    parts = [part(name, lambda _bench, name=name: run.append(name)) for name in ("one", "two")]
    parts.append(Stub("three", "", 90, "what three does", default=False, function=lambda _bench: run.append("three")))
    suite = Suite("test", parts)
    assert suite.main(None, ["--list"]) == 0 and not run
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "  one            1:00  what one does",
        "  two            1:00  what two does",
        "  three          1:30  what three does, only by --only",
    ]
    suite.main(None, [])
    suite.main(None, ["--only", "three", "two"])
    assert run == ["one", "two", "two", "three"]
    with pytest.raises(SystemExit):
        suite.main(None, ["--only", "four"])


def test_progress_is_plain_lines_with_elapsed_and_remaining_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    Suite("test", [part("one", rounds_of(clock, 20, []))], rounds=4).main(None, [])
    assert capsys.readouterr().err.splitlines() == [
        "[0:00] 1/1 one: 0:00, about 1:00 left: begins",
        "[0:00] 1/1 one: 0:00, about 1:00 left: work: round 1 of at most 4",
        "[0:20] 1/1 one: 0:20, about 1:00 left: work: round 2 of at most 4",
        "[0:40] 1/1 one: 0:40, about 0:40 left: work: round 3 of at most 4",
        "[1:00] 1/1 one: 1:00, about 0:20 left: work: round 4 of at most 4",
        "[1:20] 1/1 one: 1:20, done",
    ]
