"""Incidents made by real faults on this machine, each with the causes that `vlmpipe diagnose` may name.

A case runs real commands in a folder of its own and returns the run that met the incident. All share prepared data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.analysed_models import keep_analyses
from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import load_run_file
from vlmpipe.platforms.local.jobs.fault_injector import worker_of_rank

PATIENCE_S = 240.0
VLMPIPE = "from vlmpipe.cli.app import main; main()"  # with the arguments behind it
LONG = {"train.epochs": 1000, "train.max_steps": 3000, "train.checkpoint_every_steps": 20}
SHORT = {"train.max_steps": 30, "train.checkpoint_every_steps": 10}
TWO_NODES = {"cluster": {"replica_count": 2, "processes_per_replica": 1}}


@dataclasses.dataclass(frozen=True)
class Incident:
    """`causes`: ids of failure patterns, of which the diagnosis must name one."""

    name: str
    causes: tuple[str, ...]
    stage: Callable[[Scene], None]


INCIDENTS: dict[str, Incident] = {}


def incident(name: str, *causes: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers a case."""

    def register(stage: Callable[[Scene], None]) -> Callable[[Scene], None]:
        INCIDENTS[name] = Incident(name, causes, stage)
        return stage

    return register


class Scene:
    """A folder with a run file, and the commands that act in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs/runs/r1"

    def write(self, changes: dict[str, Any]) -> None:
        content = merged(TINY, {"features.cache": "off", "evaluate.controls": [], **changes})
        (self.folder / "run.yaml").write_text(json.dumps(content))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """`vlmpipe run` of the run file, in the background."""
        command = [sys.executable, "-c", VLMPIPE, "run", "run.yaml", "--run-id", "r1", "--plain", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        said, _ = process.communicate(timeout=PATIENCE_S)
        return said

    def go(self, changes: dict[str, Any], *arguments: str, **environment: str) -> str:
        """Run to the end."""
        self.write(changes)
        return self.finish(self.start(*arguments, **environment))

    @contextlib.contextmanager
    def training(self, changes: dict[str, Any], *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A run that has come to a few steps; waits for its end behind the block."""
        self.write({**LONG, **changes})
        process = self.start(*arguments)
        try:
            self.when(lambda: self.steps() > 3, process)
            yield process
            self.finish(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def steps(self) -> int:
        log = self.run / "metrics.jsonl"
        return log.read_text().count("\n") if log.exists() else 0

    def when(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            if process.poll() is not None or time.monotonic() > ends_s:
                raise AssertionError(f"it did not come to that:\n{self.finish(process)}")
            time.sleep(0.05)

    def worker(self, process: subprocess.Popen[str], rank: int) -> int:
        """The training process of that rank below this command."""
        found = worker_of_rank(process.pid, rank)
        assert found
        return found.pid

    def diagnosis(self) -> dict[str, Any]:
        command = [sys.executable, "-c", VLMPIPE, "diagnose", str(self.run), "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        return dict(json.loads(done.stdout)) if done.stdout.strip() else {"id": None, "cause": done.stderr.strip()}


# ---- processes and machines


@incident("a rank hangs", "stalled")
def _hung(scene: Scene) -> None:
    changes = {**TWO_NODES, "train.stall_floor_s": 3.0, "train.stall_factor": 5.0}
    with scene.training(changes) as process:
        os.kill(scene.worker(process, 1), signal.SIGSTOP)


@incident("the kernel kills a rank for lack of memory", "killed")
def _killed(scene: Scene) -> None:
    with scene.training(TWO_NODES) as process:
        os.kill(scene.worker(process, 1), signal.SIGKILL)


@incident("a rank crashes in native code", "crashed")
def _crashed(scene: Scene) -> None:
    with scene.training({}) as process:
        os.kill(scene.worker(process, 0), signal.SIGSEGV)


@incident("a node is lost", "killed", "peer-lost", "replica-exit")
def _node_lost(scene: Scene) -> None:
    scene.go({**LONG, **TWO_NODES}, "--inject-fault", "kill:node=1,after_step=4", "--retries", "0")


@incident("a Spot machine is taken back", "machine-reclaimed", "preempted")
def _reclaimed(scene: Scene) -> None:
    scene.go({**LONG, **TWO_NODES}, "--inject-fault", "preempt:node=1,after_step=4,notice=20s", "--retries", "0")


@incident("training dies again and again at the same step", "no-progress")
def _no_progress(scene: Scene) -> None:
    faults = [word for _ in range(4) for word in ("--inject-fault", "kill:rank=0,after_step=3")]
    patience = {"train.checkpoint_every_steps": 1000, "checkpoint.max_starts_without_progress": 3}
    scene.go({**LONG, **patience}, *faults, "--retries", "4")


@incident("a node is slower than the others", "straggler")
def _straggler(scene: Scene) -> None:
    changes = {**TWO_NODES, **LONG, "train.max_steps": 300}
    scene.write(changes)
    process = scene.start()
    scene.when(lambda: scene.steps() > 3, process)
    pid = scene.worker(process, 1)
    with contextlib.suppress(ProcessLookupError):  # until it ends, it is stopped for three quarters of the time
        while True:
            for number, seconds in ((signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.01)):
                os.kill(pid, number)
                time.sleep(seconds)
    scene.finish(process)


@incident("the job's time limit ends it", "job-timeout")
def _timeout(scene: Scene) -> None:
    scene.go({**LONG, "cluster": {"timeout": "20s"}})


@incident("a person presses Ctrl-C", "interrupted")
def _interrupted(scene: Scene) -> None:
    with scene.training({}) as process:
        process.send_signal(signal.SIGINT)


@incident("a person cancels the run", "cancelled", "interrupted", "preempted")
def _cancelled(scene: Scene) -> None:
    with scene.training({}):
        command = [sys.executable, "-c", VLMPIPE, "cancel", "r1"]
        subprocess.run(command, cwd=scene.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


# ---- storage


@incident("the disk is full", "no-space")
def _disk_full(scene: Scene) -> None:
    disk = scene.folder / "runs"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    scene.go({**LONG})


@incident("the newest checkpoints are damaged", "checkpoint-corrupt")
def _checkpoint(scene: Scene) -> None:
    with scene.training({"train.checkpoint_every_steps": 5}) as process:
        scene.when(lambda: list(scene.run.glob("checkpoints/*/COMMIT")), process)
        process.send_signal(signal.SIGINT)
    for path in scene.run.glob("checkpoints/*/*"):
        if path.name != "COMMIT" and path.stat().st_size > 100:
            damage(path)
    scene.finish(scene.start())


@incident("cached features are damaged", "damaged-features", "corrupt-object")
def _features(scene: Scene) -> None:
    cached = {**SHORT, "features.cache": "on"}
    scene.go(cached)
    for path in (scene.folder / "runs/features").rglob("*.safetensors"):
        damage(path)
    shutil.rmtree(scene.run)
    scene.go({**cached, "train.seed": 3})


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, min(len(content), len(content) // 2 + 64)):
        content[place] ^= 0xFF
    path.write_bytes(content)


# ---- data, settings, numbers


@incident("no image of the data can be read", "too-many-rejects", "bad-data")
def _no_images(scene: Scene) -> None:
    turns = [{"from": "human", "value": "<image>\nwhich digit?"}, {"from": "gpt", "value": "7"}]
    records = [{"id": str(number), "image": "none.png", "conversations": turns} for number in range(40)]
    (scene.folder / "data.json").write_text(json.dumps(records))
    scene.go({**SHORT, "data.source": str(scene.folder / "data.json")})


@incident("the loss is not finite", "not-finite")
def _not_finite(scene: Scene) -> None:
    scene.go({**LONG, "train.optimizer.learning_rate": 1e30, "train.clip_grad_norm": 0.0})


@incident("the hub cannot be reached", "hub-unreachable")
def _hub(scene: Scene) -> None:
    scene.go({**SHORT, "model.tower": {"weights": "no-such-organisation/no-such-tower"}}, HF_HUB_OFFLINE="0")


@incident("records are not those of any known format", "bad-data", "too-many-rejects")
def _records(scene: Scene) -> None:
    (scene.folder / "data.json").write_text(json.dumps([{"prompt": "which digit?", "label": "7"}] * 20))
    changes = {**SHORT, "data.source": str(scene.folder / "data.json")}
    scene.write(changes)
    keep_analyses(load_run_file(scene.folder / "run.yaml"))
    scene.go(changes)


@incident("the checkpoints are those of another model", "checkpoint-of-another")
def _another_model(scene: Scene) -> None:
    with scene.training({"train.checkpoint_every_steps": 5}) as process:
        scene.when(lambda: list(scene.run.glob("checkpoints/*/COMMIT")), process)
        process.send_signal(signal.SIGINT)
    kept = scene.folder / "kept"
    shutil.move(scene.run / "checkpoints", kept)
    shutil.rmtree(scene.run)
    with scene.training({"model.seed": 7}) as process:
        process.send_signal(signal.SIGINT)
    shutil.rmtree(scene.run / "checkpoints", ignore_errors=True)
    shutil.move(kept, scene.run / "checkpoints")
    scene.finish(scene.start())


@incident("a trainer of one's own fails", "program-failed")
def _own_trainer(scene: Scene) -> None:
    (scene.folder / "train.py").write_text("import sys\nprint('my own mistake', file=sys.stderr)\nsys.exit(3)\n")
    trainer = {"name": "own", "command": [sys.executable, str(scene.folder / "train.py")], "launch": "self"}
    scene.go({**SHORT, "train.trainer": trainer, "features.cache": "off"})


@incident("a trainer of one's own leaves no model", "bad-result")
def _no_model(scene: Scene) -> None:
    (scene.folder / "train.py").write_text("print('trained')\n")
    trainer = {"name": "own", "command": [sys.executable, str(scene.folder / "train.py")], "launch": "self"}
    scene.go({**SHORT, "train.trainer": trainer, "features.cache": "off"})
