"""The first hour of three users, from the wheel, outside the clone, next to folders called trainer, pipelines and
components: with photos, with pipelines of one's own, with a train.py of one's own.

Whatever a command prints as the next one is a command that parses, about files that are there.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from PIL import Image, ImageDraw

from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY, merged
from tests.support.wheel import python_with, run_installed, shadowing_packages, shared_install
from vlmpipe.cli.app import app
from vlmpipe.config.yaml_loader import shipped

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), pytest.mark.slow]

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 210), "yellow": (220, 210, 40)}
QUESTION = "What colour is the ball?"
PRINTED = re.compile(r"(?:next:|Next:\n|to do:|continue:)\s+(vlmpipe [a-z]+(?: [^\s;:,)]+)*)")
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
SHORT = ("train.max_steps=12", "train.checkpoint_every_steps=2", "cluster.replica_count=1")
PLACEHOLDERS = re.compile(r"[A-Z]{3,}|my-|\.\.\.")


class Hour:
    """A user's folder, in which commands of the wheel are typed."""

    def __init__(self, installed: Path, folder: Path) -> None:
        self.installed, self.folder = installed, folder
        shadowing_packages(folder)

    def vlmpipe(self, *arguments: str, code: int = 0) -> str:
        """Type a command; return what it said on both streams, in plain text."""
        variables = {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
        answer = run_installed(self.installed, self.folder, *arguments, **variables)
        said = answer.stdout + answer.stderr
        assert answer.returncode == code, f"{shlex.join(arguments)}: {answer.returncode}\n{said[-4000:]}"
        assert "Traceback" not in said and "\x1b[" not in said, said[-4000:]
        assert str(ROOT) not in said, "the clone"
        for command in self.printed_commands(said):
            self.require_usable(command)
        return said

    def python(self, *arguments: str) -> str:
        answer = python_with(self.installed, self.folder, *arguments)
        assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
        return answer.stdout

    @staticmethod
    def printed_commands(said: str) -> list[str]:
        found = PRINTED.findall(said)
        return [one for one in found if not PLACEHOLDERS.search(one)]

    def require_usable(self, command: str) -> None:
        """Require that what is printed is a command of vlmpipe, about run files that are there."""
        _, verb, *words = command.split()
        assert verb in COMMANDS, f"{command!r} was printed"
        for word in words:
            if word.endswith((".yaml", ".json")) and "=" not in word:
                assert (self.folder / word).exists() or shipped(Path(word)), f"{command!r} was printed: no {word}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_install(tmp_path_factory)


@pytest.fixture
def hour(installed: Path, tmp_path: Path) -> Hour:
    return Hour(installed, tmp_path)


def photos_in(folder: Path) -> None:
    folder.mkdir()
    names = list(COLOURS)
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("file_name", "question", "answer"))
        for number in range(60):
            name = names[number * 7 % 4]
            image = Image.new("RGB", (64, 48), "white")
            ImageDraw.Draw(image).ellipse((10 + number % 20, 8, 40 + number % 20, 38), fill=COLOURS[name])
            image.save(folder / f"{number:03}.jpg")
            table.writerow((f"{number:03}.jpg", QUESTION, name))


def test_photos_and_the_wheel(hour: Hour) -> None:
    photos_in(hour.folder / "photos")
    assert "init" in hour.vlmpipe("--help") and "first run" in hour.vlmpipe("docs").lower()
    assert "60 images" in hour.vlmpipe("init", "--data", "photos")
    assert "exists already" in hour.vlmpipe("init", "--data", "photos", code=64)
    assert "✗" not in hour.vlmpipe("check", "photos.yaml")
    assert "this machine" in hour.vlmpipe("plan", "photos.yaml", "--target", "local")
    assert "no runs" in hour.vlmpipe("runs").lower()
    assert "no run for @last" in hour.vlmpipe("ask", "@last", "photos/000.jpg", QUESTION, code=66)

    first = hour.vlmpipe("run", "photos.yaml", *SHORT, "--run-id", "first", "--plain")
    assert "Done in" in first and "Next:" in first
    assert (hour.folder / "runs/runs/first/report.html").is_file()
    assert hour.vlmpipe("ask", "@last", "photos/000.jpg", QUESTION).strip()
    assert "validation accuracy" in hour.vlmpipe("status", "first")

    # A failure in the middle, its diagnosis, and the command that it gives.
    fault = ("--inject-fault", "kill:rank=0,after_step=4", "--retries", "0")
    rate = "train.optimizer.learning_rate=2e-3"
    hour.vlmpipe("run", "photos.yaml", *SHORT, rate, "--run-id", "second", "--plain", *fault, code=137)
    diagnosed = hour.vlmpipe("diagnose", "second")
    (going_on,) = re.findall(r"continue:\s+vlmpipe (.+(?:\n\s{10,}\S.*)*)", diagnosed)
    assert "Done in" in hour.vlmpipe(*shlex.split(going_on), "--plain")

    listed = hour.vlmpipe("runs")
    assert "first" in listed and "second" in listed
    compared = hour.vlmpipe("compare", "first", "second")
    assert "learning_rate" in compared
    hour.vlmpipe("predict", "second", "photos", "--output", "answers.csv")
    with (hour.folder / "answers.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 60
    assert "no run 'frist'" in hour.vlmpipe("status", "frist", code=66)

    # The whole folder is moved, and a run in it continued for longer.
    hour.folder = hour.folder.rename(hour.folder.with_name("moved"))
    assert hour.vlmpipe("ask", "second", "photos/000.jpg", QUESTION).strip()
    assert "no such file" not in hour.vlmpipe("status", "first", "--deep")
    assert "which no run uses" not in hour.vlmpipe("runs", "prune", "--keep", "1", "--dry-run")
    longer = hour.vlmpipe("run", "photos.yaml", "train.max_steps=14", *SHORT[1:], "--run-id", "first", "--plain")
    assert "Continuing run first" in longer and "after 14 steps" in longer


OURS = ROOT / "examples/own_pipeline/pipeline.py"
LOCALLY = """
from kfp import local
from pipeline import own_pipeline
import pipelines.task, components.task, trainer.task  # the user's own
local.init(local.SubprocessRunner(use_venv=False))
task = own_pipeline(run_file=open("run.json").read(), root_uri="root", run_id="mine", samples=100, target="local")
print("said:", task.output)
"""


def test_pipelines_of_ones_own(hour: Hour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_PIPELINE_IMAGE", "example.com/mine/pipeline:1")
    assert "run_job" in hour.vlmpipe("docs", "how-to/python-api")
    shutil.copy(OURS, hour.folder / "pipeline.py")
    run_file = merged(TINY, {"train.max_steps": 4, "evaluate.max_samples": 8})
    (hour.folder / "run.json").write_text(json.dumps(run_file))
    (hour.folder / "run.yaml").write_text(json.dumps(run_file))
    assert "✗" not in hour.vlmpipe("check", "run.yaml")
    hour.python("pipeline.py")
    assert (hour.folder / "own-pipeline.yaml").is_file()
    (hour.folder / "locally.py").write_text(LOCALLY)
    assert "said: mine is in" in hour.python("locally.py")
    assert (hour.folder / "root/runs/mine/export/model.safetensors").is_file()
    compiling = ("compile", "run.yaml", "--target", "kubeflow", "--output", "build")
    refused = hour.vlmpipe(*compiling, code=64)
    named = re.findall(r"^ +([a-z_.]+): ", refused, re.MULTILINE)
    values = {"gcp.pipeline_image": "example.com/pipeline:1", "cluster.image_uri": "example.com/trainer:1"}
    values["output.root_uri"] = "gs://bucket/runs"
    assert set(named) == set(values)
    hour.vlmpipe(*compiling, *(f"{name}={value}" for name, value in values.items()))
    assert list((hour.folder / "build").glob("*.yaml"))


def test_a_train_py_of_ones_own(hour: Hour) -> None:
    assert "What done means" in hour.vlmpipe("docs", "bring-your-own-trainer")
    shutil.copy(ROOT / "recipes/plain/train.py", hour.folder / "train.py")
    text = (ROOT / "recipes/plain/run.yaml").read_text().replace("recipes/plain/train.py", "train.py")
    (hour.folder / "mine.yaml").write_text(text)
    short = [
        "train.max_steps=12", "train.checkpoint_every_steps=4", "data.max_samples=200", "gate=none",
        "evaluate.max_samples=8", "evaluate.controls=[]", "cluster.processes_per_replica=1",
    ]  # fmt: skip
    assert "✗" not in hour.vlmpipe("check", "mine.yaml", *short)
    (hour.folder / "train.py").rename(hour.folder / "gone.py")
    assert "there is no file train.py" in hour.vlmpipe("check", "mine.yaml", *short, code=64)
    assert "there is no file train.py" in hour.vlmpipe("run", "mine.yaml", *short, "--plain", code=64)
    assert not (hour.folder / "runs").exists()
    (hour.folder / "gone.py").rename(hour.folder / "train.py")
    Image.new("RGB", (64, 64), "white").save(hour.folder / "ball.png")
    done = hour.vlmpipe("run", "mine.yaml", *short, "--run-id", "own", "--plain")
    assert "after 12 steps of plain" in done and "Done in" in done
    assert hour.vlmpipe("status", "@last").count("own")
    assert hour.vlmpipe("ask", "own", "ball.png", "what digit is this?").strip()
    broken = (hour.folder / "train.py").read_text().replace("while done < args.steps:", "while done < 3:")
    (hour.folder / "train.py").write_text(broken)
    hour.vlmpipe("run", "mine.yaml", *short, "--run-id", "less", "--plain", code=75)
    assert "continue:" in hour.vlmpipe("diagnose", "less")
