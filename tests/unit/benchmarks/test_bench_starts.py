"""The table of random starts, and the docs that state its ranges."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

import pytest
import yaml

from benchmarks import bench_starts
from benchmarks.bench_starts import RUN_FILES, Scores, scores, table
from tests.support.paths import ROOT

EVALUATED = {
    "samples": 300,
    "questions": 1100,
    "exact_match": 0.95,
    "chance": 0.275,
    "loss": 4.671,
    "anls": 0.03,
    "preference_accuracy": 0.85,
    "reference_preference_accuracy": 0.78,
    "reward_accuracy": 0.8,
    "controls": {
        name: {"exact_match": 0.21} for name in ("shuffled_image", "no_image", "all_tokens", "uniform_tokens")
    },
}
# Shares of the last stage's evaluate.json, and of an earlier stage's where the run file has one.
READ = {
    "digits": (0.95, 0.21, 0.21, 0.275),
    "digits-preferences": (0.78, 0.85, 0.8, 0.5, 0.95),
    "arr-coc": (0.5, 0.95, 0.21, 0.21),
    "openmoji": (4.671, 0.95, 0.03),
}


@pytest.mark.parametrize("run_file", RUN_FILES)
def test_all_shares_are_read_from_a_run(run_file: str, tmp_path: Path) -> None:
    for stage in {"", *(share.stage for share in RUN_FILES[run_file])}:
        folder = tmp_path / "stages" / stage if stage else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluate.json").write_text(json.dumps(EVALUATED | {"exact_match": 0.5 if stage else 0.95}))
    assert scores(run_file, 3, tmp_path) == Scores(3, 1100, READ[run_file])


@pytest.mark.parametrize("run_file", RUN_FILES)
def test_the_run_files_and_their_stages_are_there(run_file: str) -> None:
    stages = [
        stage["name"] for stage in yaml.safe_load((ROOT / f"configs/{run_file}.yaml").read_text()).get("stages", [])
    ]
    assert {share.stage for share in RUN_FILES[run_file]} <= {"", *stages[:-1]}


def test_a_share_is_a_range_with_its_spread() -> None:
    found = [Scores(seed, 1100, (share, 0.21, 0.22, 0.275)) for seed, share in enumerate((0.95, 0.93, 0.94))]
    lines = table("digits", found)
    assert lines[2] == "| 0 | 1,100 | 95.0 % | 21.0 % | 22.0 % | 27.5 % |"
    assert lines[-2].startswith("| range | | 93.0 to 95.0 % | 21.0 to 21.0 % |")
    assert lines[-1].startswith("| standard deviation, points | | 1.0 | 0.0 |")


def test_a_loss_is_no_share() -> None:
    lines = table("openmoji", [Scores(seed, 151, (loss, 0.0, 0.03)) for seed, loss in enumerate((4.671, 4.706))])
    assert lines[2] == "| 0 | 151 | 4.67 | 0.0 % | 3.0 % |"
    assert lines[-2] == "| range | | 4.67 to 4.71 | 0.0 to 0.0 % | 3.0 to 3.0 % |"
    assert lines[-1].startswith("| standard deviation, points; of a loss nats |")
    assert lines[-1].endswith("| 0.025 | 0.0 | 0.0 |")


def test_one_start_has_no_spread() -> None:
    assert table("digits", [Scores(0, 1100, (0.95, 0.21, 0.22, 0.275))])[-1].startswith("| range |")


# In place of vlmpipe: the first start ends with scores; the second stops the benchmark and notes how it ends itself.
RUN = """
import json, os, pathlib, signal, sys, time
root = pathlib.Path(next(each for each in sys.argv if each.startswith("output.root_uri=")).partition("=")[2])
run = root / "runs" / str(len(list(root.glob("runs/*"))))
run.mkdir(parents=True)
(run / "evaluate.json").write_text(json.dumps(%r))
if run.name == "1":
    def end(*_):
        pathlib.Path(%r).write_text("told")
        raise SystemExit(130)
    signal.signal(signal.SIGTERM, end)
    os.kill(os.getppid(), %d)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_prints_the_starts_that_ended_and_stops_its_run(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(bench_starts, "VLMPIPE", RUN % (EVALUATED, str(tmp_path / "ended"), number))
    assert bench_starts.main(["digits", "--markdown", str(tmp_path / "found.md")]) == 130
    printed = (tmp_path / "found.md").read_text()
    assert printed.startswith("# digits from 1 random starts, stopped before 5")
    assert "| 0 | 1,100 | 95.0 % | 21.0 % | 21.0 % | 27.5 % |" in printed and "| 1 |" not in printed
    assert printed in capsys.readouterr().out
    assert (tmp_path / "ended").read_text() == "told", "the run that was going on"
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("page", ["README.md", "docs/reference/evidence.md"])
def test_a_page_has_the_range_of_the_newest_results(page: str) -> None:
    newest = sorted((ROOT / "benchmarks/results").glob("*-cpu-quickstart.md"))[-1]
    (line,) = (line for line in newest.read_text().splitlines() if line.startswith("| range |"))
    right_image = line.split("|")[3].strip()
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    claim = text.partition("quickstart's model uses")[2][:400]
    assert f": {right_image} of 1,100 validation questions" in claim and newest.name in claim
