"""recipes/tensorflow: train.py reads exported TFRecord files, and synchronous strategies give one process's losses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.components.runtime.resolve import open_run_folder
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.progress import Progress

RECIPE, ENVIRONMENT = ROOT / "recipes/tensorflow", ROOT / "build/recipes/tensorflow"
STEPS = 6
SIX_DIGITS = 1e-6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").is_file(), reason="make recipe-tensorflow makes its environment"
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few digits as `tfrecord`, and beside them as `messages`."""
    root = tmp_path_factory.mktemp("digits")
    config = load_run_file(RECIPE / "multiworker.yaml", ["data.max_samples=200"])
    run_uri = open_run_folder(json.dumps(config.to_dict()), str(root), run_id="digits")
    job = JobConfig.load(f"{run_uri}/run.json")
    prepare_run(job, Progress(run_uri, "prepare-data", quiet=True))
    for name in ("tfrecord", "messages"):
        export_data(job.pointers().prepared_uri, name, root / name)
    return root / "tfrecord"


class Training:
    """One training in `folder`: a process for each TF_CONFIG, the chief first."""

    def __init__(self, folder: Path, data: Path, strategy: str, *options: str, clusters: Sequence[str] = ("",)) -> None:
        self.folder, self._processes = folder, []
        (folder / "output").mkdir(parents=True)
        for number, cluster in enumerate(clusters):
            environment = {**os.environ, "VLMPIPE_METRICS": str(folder / f"metrics-{number}.jsonl")}
            environment |= {"TF_CONFIG": cluster} if cluster else {}
            environment.pop("PYTHONPATH", None)
            command = [
                str(ENVIRONMENT / "bin/python"), str(RECIPE / "train.py"), "--strategy", strategy, "--data", str(data),
                "--output", str(folder / "output"), "--checkpoints", str(folder / "checkpoints"), "--batch", "8",
                "--steps", str(STEPS), "--save-every", "4", "--log-every", "1", "--seed", "1",
                "--learning-rate", "1e-3", *options,
            ]  # fmt: skip
            with (folder / f"log-{number}").open("w") as log:
                self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def codes(self) -> list[int]:
        return [process.wait() for process in self._processes]

    def losses(self, process: int = 0) -> list[float]:
        """Of all steps, when it has ended well."""
        assert set(self.codes()) == {0}, (self.folder / "log-0").read_text()[-3000:]
        return [line["loss"] for line in self.lines(process)]

    def lines(self, process: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"metrics-{process}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def two_workers() -> Iterator[str]:
    """TF_CONFIG of a chief and a worker at free ports."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("localhost", 0))
        chief, worker = (f"localhost:{probe.getsockname()[1]}" for probe in probes)
    for role in ("chief", "worker"):
        task = {"type": role, "index": 0}
        yield json.dumps({"cluster": {"chief": [chief], "worker": [worker]}, "task": task})


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process with one device."""
    return Training(tmp_path_factory.mktemp("alone"), data, "mirrored").losses()


def test_two_workers_give_the_losses_of_one_process(data: Path, alone: list[float], tmp_path: Path) -> None:
    both = Training(tmp_path / "both", data, "multiworker", clusters=list(two_workers()))
    assert both.losses() == pytest.approx(alone, rel=SIX_DIGITS) == both.losses(1)
    assert len(alone) == STEPS and alone[-1] != pytest.approx(alone[0], rel=1e-3), "it learns something"
    assert (both.folder / "output/saved_model.pb").is_file()


def test_two_replicas_in_a_process_give_the_losses_of_one(data: Path, alone: list[float], tmp_path: Path) -> None:
    both = Training(tmp_path / "both", data, "mirrored", "--cpu-devices", "2")
    assert both.losses() == pytest.approx(alone, rel=SIX_DIGITS)


def test_resumed_from_a_checkpoint_it_makes_the_steps_that_it_would_have_made(
    data: Path, alone: list[float], tmp_path: Path
) -> None:
    straight = Training(tmp_path / "straight", data, "mirrored")
    assert straight.losses() == alone
    checkpoint = tmp_path / "straight/checkpoints/checkpoint-4"
    resumed = Training(tmp_path / "resumed", data, "mirrored", "--resume", str(checkpoint))
    assert resumed.losses() == alone[4:]


def test_asked_to_stop_both_workers_stop_after_the_same_step_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    many = ["--steps", "100000"]
    both = Training(tmp_path / "both", data, "multiworker", *many, clusters=list(two_workers()))
    while not both.lines():
        time.sleep(0.1)
    both.stop()
    assert both.codes() == [ExitCode.PREEMPTED] * 2
    steps = [both.lines(process)[-1]["step"] for process in range(2)]
    saved = json.loads((tmp_path / f"both/checkpoints/checkpoint-{steps[0]}/trainer_state.json").read_text())
    assert steps == [saved["global_step"]] * 2


READ = """
import json, sys
from pathlib import Path
from questions import read_questions
turns = read_questions(Path(sys.argv[1]), sys.argv[2]).as_numpy_iterator()
print(json.dumps([[question.decode(), answer.decode()] for _, question, answer in turns]))
"""


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_question_is_read_from_the_records(data: Path, split: str) -> None:
    command = [str(ENVIRONMENT / "bin/python"), "-c", READ, str(data), split]
    read = subprocess.run(command, cwd=RECIPE, check=True, capture_output=True, text=True)
    samples = map(json.loads, (data.with_name("messages") / f"{split}.jsonl").read_text().splitlines())
    expected = [
        [asked["content"].removeprefix("<image>"), answered["content"]]
        for sample in samples
        for asked, answered in zip(sample["messages"][::2], sample["messages"][1::2], strict=True)
    ]
    assert json.loads(read.stdout) == expected and len(expected) > 20
