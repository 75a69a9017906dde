"""Real training of a tiny model while its store is away or its disk is full: python -m MODULE ROOT CASE...

A case is "store PHASE", "store PHASE for ever" or "disk PHASE" ...: where the run writes, in which phase of its life
that fails, and whether it works again. All run in one process, one after another. Prints what became of each as JSON,
and of "undisturbed".
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.crash.phases import PHASES, SAVED_EVERY, STEPS, Phase
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.runs import make_run
from vlmpipe.trainer import loop
from vlmpipe.trainer.checkpoint import failed_saves, manager
from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import Listing, committed, inspect
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext, StopRequest
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import background_writer, gcs, open_storage, outage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_lines, read_record

ALONE = ProcessContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
CHANGES = {
    "train.max_steps": STEPS,
    "train.checkpoint_every_steps": SAVED_EVERY,
    "train.keep_checkpoints": 1,
    "checkpoint.async_save": False,  # so that a fault of one save is not met by another
    "features.cache": "off",
}
FOR_EVER_S = 0.2  # without a COMMIT
ALWAYS = 10**9


@dataclass
class Events:
    """Counts what happens in a run, and calls what is to be done then."""

    actions: dict[tuple[str, int], Callable[[], None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def happened(self, event: str, number: int | None = None) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1 if number is None else number
        if action := self.actions.pop((event, self.counts[event]), None):
            action()


EVENTS = Events()


def watch() -> None:
    """Have the trainer's own functions report their calls, and wait for milliseconds."""
    totals, count = loop.AsyncStepMetrics, failed_saves.FailedSaves.count

    def pending(loss_share: Any, result: Any, data: Any, **settings: Any) -> Any:
        EVENTS.happened("step", data.step + 1)
        return totals(loss_share, result, data, **settings)

    def counted(self: Any, step: int, error: UserError) -> UserError | None:
        ending = count(self, step, error)
        EVENTS.happened("failed save")
        return ending

    loop.AsyncStepMetrics = pending  # type: ignore[assignment, misc]
    failed_saves.FailedSaves.count = counted  # type: ignore[method-assign]
    failed_saves.RETRY_S = manager.POLL_S = 0.0
    background_writer.REMOTE_INTERVAL_S = background_writer.LOCAL_INTERVAL_S = 0.0
    outage.FIRST_WAIT_S = outage.LONGEST_WAIT_S = 0.02
    sleep = outage.time.sleep
    outage.patiently.__kwdefaults__["sleep"] = lambda seconds: (EVENTS.happened("wait"), sleep(seconds))
    quick = gcs.RETRY.with_delay(initial=0.01, maximum=0.02).with_timeout(0.1)
    gcs.GcsStorage.__init__.__kwdefaults__ |= {"retry": quick, "timeout_s": 5.0}


class Store:
    """Cloud Storage that answers 503 to the writes of a phase."""

    def __init__(self, server: FakeGcs) -> None:
        self._server = server
        self.root_uri = "gs://bucket/vlm"

    def fail(self, phase: Phase) -> None:
        body = "" if phase.only else f'"name": ?"[^"]*({phase.names})'
        self._server.faults.append(Fault("status", method=phase.only or "POST|PUT", body=body, times=ALWAYS))

    def work(self) -> None:
        self._server.faults.clear()


class Disk:
    """A folder that has no room for the files of a phase."""

    def __init__(self, folder: Path) -> None:
        self.root_uri = str(folder)
        self._durable = LocalStorage._durable

    def fail(self, phase: Phase) -> None:
        durable = self._durable

        @contextlib.contextmanager
        def full(store: LocalStorage, name: str, *arguments: Any, **options: Any) -> Iterator[str]:
            with durable(store, name, *arguments, **options) as temporary:
                if re.search(phase.names, name):
                    raise OSError(28, os.strerror(28), temporary)
                yield temporary

        LocalStorage._durable = full  # type: ignore[method-assign]

    def work(self) -> None:
        LocalStorage._durable = self._durable  # type: ignore[method-assign]


class Temporary(Disk):
    """A disk for temporary files that is full: checkpoints are written there first."""

    def fail(self, phase: Phase) -> None:
        self._folder = tempfile.tempdir
        tempfile.tempdir = "/sys/kernel"  # nobody may write there, as on a disk that has turned read-only

    def work(self) -> None:
        tempfile.tempdir = self._folder


def run(name: str, place: Store | Disk, prepared: JobConfig, phase: Phase | None, *, for_ever: bool) -> dict[str, Any]:
    """Train a run with a fault in it, then, if it did not end well, once more without. What became of it."""
    run_id = name.replace(" ", "-")
    content = json.loads(prepared.model_dump_json()) | {"run": {"run_id": run_id, "root_uri": place.root_uri}}
    content["checkpoint"]["max_s_without_commit"] = FOR_EVER_S if for_ever else 600.0
    job = JobConfig.model_validate(content)
    store = open_storage(job.run.run_uri)
    store.write("run.json", job.model_dump_json().encode())
    store.write("prepared.json", prepared.pointers().model_dump_json().encode())
    before = [info.name for info in store.list()]
    EVENTS.actions.clear(), EVENTS.counts.clear()
    if phase:
        EVENTS.actions["step", phase.from_step] = functools.partial(place.fail, phase)
        if not for_ever:
            EVENTS.actions[phase.until] = place.work
        if not phase.from_step:
            place.fail(phase)
    found = trained(job)
    if phase:
        place.work()
    found["changed"] = [info.name for info in store.list() if info.name not in before] if found["code"] else []
    found["committed_then"] = [step_of(each) for each in committed(store)]
    if found["code"]:
        found["again"] = trained(job)["code"]
    return found | result_of(job)


def trained(job: JobConfig) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code, error = int(loop.train(job, ALONE, StopRequest())), ""
        except UserError as failed:
            code, error = int(failed.code), failed.found
    return {"code": code, "error": error, "warnings": said.getvalue().splitlines()}


def result_of(job: JobConfig) -> dict[str, Any]:
    """What a run has made: its steps, its checkpoints, and the checksums of the last one's files."""
    store = open_storage(job.run.run_uri)
    last, passed_over = newest_good(store)
    assert last and not passed_over
    _, files = inspect(store, last.name, Listing.read(store))
    record = read_record(store, "steps/train.json")
    return {
        "steps": [line["step"] for line in read_lines(store, "metrics.jsonl")],
        "losses": [line["loss"] for line in read_lines(store, "metrics.jsonl")],
        "committed": [step_of(name) for name in committed(store)],
        "folders": len(Listing.read(store).folders),
        "files": {name: sums.crc32c for name, sums in files.items() if name != ".metadata"},
        "summary": read_record(store, "summary.json")["steps"],
        "state": record["state"],
        "notes": record["detail"].get("notes", []),
    }


def main() -> None:
    root, *cases = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.use_deterministic_algorithms(True)
    tempfile.tempdir = root
    with FakeGcs(buckets=["bucket"]) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
        prepared = make_run(Path(root), "prepared", CHANGES, features="off")
        watch()
        places = {"store": Store(server), "disk": Disk(Path(root)), "temporary": Temporary(Path(root))}
        found = {"undisturbed": run("undisturbed", places["disk"], prepared, None, for_ever=False)}
        for case in cases:
            kind, _, what = case.partition(" ")
            name = what.removesuffix(" for ever")
            found[case] = run(case, places[kind], prepared, PHASES[name], for_ever=name != what)
    print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads may abort a process that ends the usual way


if __name__ == "__main__":
    main()
