"""Starts a run file's trainer on the tiny model as a local job would, and reads the losses that it logs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.job_spec.build import worker_pools
from vlmpipe.platforms.jobs.inherited_environment import inherited_environment
from vlmpipe.prove.sample_set import NUM_SAMPLES, SIDE
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.model import GRID_FAMILIES
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.metrics import read_metrics
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

POLL_S = 0.2
OWN_CODE = re.compile(r"^launcher: train\.trainer \S+ ended with exit code (\d+)$", re.MULTILINE)
LONG_STEPS = 5000
SEQUENCE_TOKENS, PACKED_TOKENS = 512, 4096
# Of the run file's train section; everything else there, such as the strategy, is the user's.
SAME_FOR_ALL: dict[str, object] = {
    "epochs": 10_000, "precision": "fp32", "compile": "off", "lr_schedule": "constant", "warmup_fraction": 0.0,
    "warmup_steps": None, "clip_grad_norm": 0.0, "ema_decay": 0.0, "log_every_steps": 1, "validate_every_steps": 0,
    "seed": 0, "keep_checkpoints": 5,
}  # fmt: skip
LEARNING_RATE = 5e-3


@dataclass(frozen=True)
class Start:
    """Settings that differ between the starts of a trainer. By default all samples are one step of one process."""

    processes: int = 1
    micro_batch_size: int = NUM_SAMPLES
    global_batch_size: int = NUM_SAMPLES
    steps: int = 3
    checkpoint_every_steps: int = LONG_STEPS
    packed: bool = False  # all samples in one sequence
    text_only: bool = False  # half of the samples have no image
    stop_after_step: int = 0  # SIGTERM once it is logged


@dataclass(frozen=True)
class Ended:
    """How a start ended. `losses` are those logged, by step."""

    losses: dict[int, float]
    exit_code: int
    output: str = ""
    timed_out: bool = False
    resumed_from_step: int | None = None
    run_uri: str = ""

    @property
    def own_exit_code(self) -> int:
        """The exit code of the trainer's own process, where a launcher reports it; else the launcher's."""
        told = OWN_CODE.findall(self.output)
        return int(told[-1]) if told else self.exit_code

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "no output")


class Trainer(Protocol):
    """A trainer that laws are checked on."""

    packs: bool
    resumes: bool
    accumulates: bool

    def start(self, run_id: str, start: Start) -> Ended:
        """Train. The same `run_id` again continues. Raises UserError for a setting that the trainer lacks."""
        ...

    def export(self, ended: Ended) -> Path:
        """The folder of the trained Hugging Face model. Raises UserError where there is none."""
        ...


@dataclass
class LocalTrainer:
    """The trainer that a run file names, started on this machine's CPU."""

    config: RunConfig
    model: Mapping[str, object]  # the model section
    samples: Path  # holds samples.json, and text_only/samples.json
    root: Path
    limit_s: float
    packs: bool = field(init=False)
    resumes: bool = field(init=False)
    accumulates: bool = field(init=False)

    def __post_init__(self) -> None:
        program = self.config.train.trainer
        self.packs, self.resumes = program is None, program is None or bool(program.resume_args)
        self.accumulates = program is None or "train.micro_batch_size" in program.used_settings

    def start(self, run_id: str, start: Start) -> Ended:
        run = self._run_file(start)
        paths = RunPaths(run_id=run_id, root_uri=str(self.root))
        store = open_storage(paths.run_uri)
        write_record(store, "run.json", run.to_run_json(paths))
        self._prepare(JobConfig.load(store.uri("run.json")))
        return self._train(run, paths.run_uri, start.stop_after_step)

    def export(self, ended: Ended) -> Path:
        from vlmpipe.components.runtime.run_results import sync_model

        sync_model(JobConfig.load(f"{ended.run_uri}/run.json"))
        return Path(ended.run_uri, "export")

    def told_versions(self) -> dict[str, str]:
        """Versions in the summary of a start, where it has any."""
        for summary in sorted(self.root.glob(f"runs/*/{Summary.FILE}")):
            return dict(Summary.read(open_storage(str(summary.parent))).versions)
        return {}

    def _run_file(self, start: Start) -> RunConfig:
        train = self.config.to_dict()["train"] | SAME_FOR_ALL
        train |= {
            "micro_batch_size": 1 if start.packed else start.micro_batch_size,
            "global_batch_size": 1 if start.packed else start.global_batch_size,
            "max_steps": start.steps,
            "checkpoint_every_steps": start.checkpoint_every_steps,
            "optimizer": train["optimizer"] | {"learning_rate": LEARNING_RATE},
        }
        content = {
            "name": "prove",
            "model": dict(self.model),
            "data": {
                "source": str(self.samples / ("text_only" if start.text_only else "") / "samples.json"),
                "sequence_length": PACKED_TOKENS if start.packed else SEQUENCE_TOKENS,
                "pack": start.packed,
            },
            "features": {"cache": "off"},
            "train": train,
            "cluster": {"replica_count": 1, "processes_per_replica": start.processes},
            "output": {"root_uri": str(self.root)},
        }
        return parse_run_config(content, "vlmpipe prove")

    def _prepare(self, job: JobConfig) -> None:
        from vlmpipe.trainer.data.prepare.pipeline import prepare

        prepared = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
        pointers = DataPointers(prepared_uri=prepared.uri, features_uri="", features="off")
        pointers.write(open_storage(job.run.run_uri))

    def _train(self, run: RunConfig, run_uri: str, stop_after_step: int) -> Ended:
        spec = worker_pools(run, "train", run_uri)[0]["container_spec"]
        command = [sys.executable, "-P", *spec["command"][1:], *spec["args"]]
        # All laws are about arithmetic: the CPU of any machine will do, and has room for four processes.
        environment = inherited_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log = Path(run_uri, "prove.log")
        before = len(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else 0
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
            try:
                timed_out = not self._wait(process, run_uri, stop_after_step)
            finally:
                _kill(process)
        store = open_storage(run_uri)
        summary = Summary.read_if_there(store) or Summary()
        output, resumed = log.read_text(encoding="utf-8", errors="replace")[before:], summary.resumed_from_step
        return Ended(_losses(run_uri), process.returncode, output, timed_out, resumed, run_uri)

    def _wait(self, process: subprocess.Popen[bytes], run_uri: str, stop_after_step: int) -> bool:
        """Wait for the end; False when the time is over."""
        ends_s = time.monotonic() + self.limit_s
        while time.monotonic() < ends_s:
            if stop_after_step and max(_losses(run_uri), default=0) >= stop_after_step:
                process.send_signal(signal.SIGTERM)
                stop_after_step = 0
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
                return True
        return False


def model_section(family: str, folder: Path) -> dict[str, object]:
    """The model section of a tiny model in `folder`."""
    sizes = {"min_pixels": SIDE**2, "max_pixels": SIDE**2} if family in GRID_FAMILIES else {}
    sizes |= {"image_size": SIDE} if family == "llava" else {}
    return {"family": family, "pretrained": {"weights": str(folder)}, "tokenizer": str(folder), "freeze": [], **sizes}


def _losses(run_uri: str) -> dict[int, float]:
    lines = {line.step: line.number("loss") for line in read_metrics(open_storage(run_uri))}
    return {step: loss for step, loss in lines.items() if loss is not None}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, in whatever sessions they are."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
