"""Real training of a tiny model under SIGKILL at random times: nothing may be lost, nothing made differently.

    python -m tests.crash.soak --rounds 50 --seed 1        (make soak N=50 SEED=1)

Two nodes of two ranks each, run by the local twin of a Vertex AI job, with its restarts. In each round a random rank,
rank 0 or a whole node is killed, up to three times, at moments drawn from the seed and the round's number: from the
start of the program over any step to the writing of a checkpoint. Afterwards the round must agree with a run that
nothing happened to: each step's rows once and in order, loss and gradient norm of each step bit for bit, and every byte
of weights, optimizer state and random state in the last checkpoint, which is read and verified. Exit code 1 if any
round does not, or if no kill of a round came about: it would prove nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.runs import make_run, metrics
from vlmpipe.platforms.local.jobs.fault_spec import Event
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.platforms.step_context import FAULTS_VARIABLE, RETRIES_VARIABLE
from vlmpipe.runs.folders.fault_summary import FAULTS_FILE
from vlmpipe.trainer.checkpoint.commit import Listing, inspect
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage

NODES, NUM_STEPS, CHECKPOINT_EVERY_STEPS = 2, 60, 8
RANKS_PER_NODE = 2  # so that a rank can die on a node that lives on
COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "label_tokens", "rows")
LONGEST_START_S = 8.0  # a kill drawn for the start comes this long after it, at the latest
CHANGES = {
    "train.max_steps": NUM_STEPS,
    "train.epochs": 1000,
    "train.global_batch_size": 16,  # steps long enough to be hit
    "train.checkpoint_every_steps": CHECKPOINT_EVERY_STEPS,
    "features.cache": "off",
}


@dataclass(frozen=True)
class Result:
    """What a run made: each step's numbers, and the checksums of its last checkpoint's files."""

    steps: list[dict[str, Any]]
    files: dict[str, int]


@dataclass(frozen=True)
class Round:
    """One disturbed run. `difference` says how it differs from the undisturbed one; empty when it does not."""

    number: int
    faults: str
    kills: list[int | None]  # steps that training had made at each; None while it was starting
    restarts: int
    steps_repeated: int
    wall_s: float
    difference: str


def train(root: Path, run_id: str, faults: str = "", *, ranks_per_node: int = 1) -> JobConfig:
    """Train a run to its end as a local job of two nodes, with the given faults. What it says goes to <run_id>.log."""
    processes = str(ranks_per_node)
    job = make_run(root, run_id, CHANGES, features="off")
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": {
            "image_uri": "python:3.11",
            "command": ["python", "-m", "vlmpipe.trainer.launch"],
            "args": [
                "--nproc-per-node",
                processes,
                "--",
                "vlmpipe.trainer.train",
                "--config",
                f"{job.run.run_uri}/run.json",
            ],
        },
    }
    spec = {
        "worker_pool_specs": [pool] * NODES,
        "base_output_directory": {"output_uri_prefix": job.run.run_uri},
        "scheduling": {"restart_job_on_worker_restart": True},
    }
    before = {name: os.environ.pop(name, None) for name in (FAULTS_VARIABLE, RETRIES_VARIABLE)}
    os.environ |= {FAULTS_VARIABLE: faults} if faults else {}
    try:
        with (root / f"{run_id}.log").open("w") as log, contextlib.redirect_stdout(log):
            run_job(run_id, spec, labels={"vlmpipe-step": "train"})
    finally:
        os.environ.pop(FAULTS_VARIABLE, None)
        os.environ |= {name: value for name, value in before.items() if value is not None}
    return job


def result_of(job: JobConfig) -> Result:
    """Read what a run made: the last checkpoint is compared with its checksums, and these are what it made."""
    steps = [{name: line[name] for name in COMPARED} for line in metrics(job)]
    store = open_storage(job.run.run_uri)
    last, passed_over = newest_good(store)
    if last is None or last.record.step != NUM_STEPS or passed_over:
        raise UserError(f"no whole checkpoint of step {NUM_STEPS}: {'; '.join(passed_over) or last}")
    _, files = inspect(store, last.name, Listing.read(store))
    # DCP's metadata hold times and names.
    return Result(steps, {name: sums.crc32c for name, sums in files.items() if name != ".metadata"})


def difference(found: Result, expected: Result) -> str:
    """How two runs differ, in words, or "" when they do not."""
    made = [line["step"] for line in found.steps]
    if made != list(range(1, NUM_STEPS + 1)):
        return f"steps are not 1 to {NUM_STEPS} once each: {made}"
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        if ours != theirs:
            return f"step {ours['step']}: {ours}, undisturbed {theirs}"
    changed = sorted(name for name, _ in set(found.files.items()) ^ set(expected.files.items()))
    return f"files of the last checkpoint: {', '.join(changed)}" if changed else ""


def kills(seed: int, number: int, *, ranks_per_node: int = 1) -> str:
    """The kills of a round: one to three, of a random rank, of rank 0 or of a node, anywhere from the start on."""
    draw = random.Random(f"{seed}-{number}").random
    events = []
    for _ in range(1 + int(3 * draw())):
        any_rank, any_node = int(draw() * NODES * ranks_per_node), int(draw() * NODES)
        rank, node = ((any_rank, None), (0, None), (None, any_node))[int(3 * draw())]
        starting = draw() < 0.2
        step = 0 if starting else 1 + int(draw() * NUM_STEPS * 0.6)
        delay_s = round(draw() * (LONGEST_START_S if starting else 0.6), 2)
        events.append(Event("kill", step, node=node, rank=rank, delay_s=delay_s))
    return ";".join(map(str, events))


def disturbed(root: Path, number: int, faults: str, expected: Result, *, ranks_per_node: int = 1) -> Round:
    """One round, compared with the undisturbed run. A job that fails counts as a difference."""
    run_id, started_s = f"round-{number}", time.monotonic()
    try:
        found = difference(result_of(train(root, run_id, faults, ranks_per_node=ranks_per_node)), expected)
    except UserError as error:
        found = error.found
    lines = [json.loads(line) for line in (root / "runs" / run_id / FAULTS_FILE).read_text().splitlines()]
    restarts = [line for line in lines if line["event"] == "restart"]
    killed = [line["said_steps"] for line in lines if line["event"] == "kill"]
    faulty = [line for line in lines if line["event"] in ("kill", "preempt")]
    if not found and len(restarts) < min(1, len(killed)):
        found = "a kill was followed by no restart"
    return Round(
        number,
        faults,
        kills=killed,
        restarts=len(restarts),
        steps_repeated=sum(line["steps_repeated"] for line in restarts),
        wall_s=time.monotonic() - started_s,
        difference=found or ("" if faulty else "no fault came about"),
    )


def table(rounds: Sequence[Round]) -> list[str]:
    """The rounds as lines of text."""
    lines = [f"{'round':>5} {'killed at steps':>15} {'restarts':>8} {'steps repeated':>14} {'seconds':>7}  outcome"]
    for one in rounds:
        steps = ", ".join("start" if step is None else str(step) for step in one.kills)
        counts = f"{one.number:5} {steps:>15} {one.restarts:8} {one.steps_repeated:14} {one.wall_s:7.1f}"
        lines.append(f"{counts}  {one.difference or 'same'}   [{one.faults}]")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and print the table as it grows."""
    parser = argparse.ArgumentParser(prog="tests.crash.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in; default a temporary one")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmpipe-soak-")))
        root.mkdir(parents=True, exist_ok=True)
        what = f"{NODES} nodes of {RANKS_PER_NODE} ranks, {NUM_STEPS} steps"
        print(f"soak: {options.rounds} rounds, seed {options.seed}, {what}", flush=True)
        expected = result_of(train(root, "undisturbed", ranks_per_node=RANKS_PER_NODE))
        rounds: list[Round] = []
        for number in range(1, options.rounds + 1):
            faults = kills(options.seed, number, ranks_per_node=RANKS_PER_NODE)
            rounds.append(disturbed(root, number, faults, expected, ranks_per_node=RANKS_PER_NODE))
            print("\n".join(table(rounds)[-1:] if number > 1 else table(rounds)), flush=True)
    wrong = sum(bool(one.difference) for one in rounds)
    landed = [step for one in rounds for step in one.kills]
    drawn = sum(len(one.faults.split(";")) for one in rounds)
    same = f"{len(rounds) - wrong} of {len(rounds)} rounds the same as undisturbed"
    starting = f"{landed.count(None)} while training was starting"
    print(f"soak: {same}, {len(landed)} of {drawn} kills came about ({starting}), seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
