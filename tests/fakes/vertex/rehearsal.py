"""A rehearsal of Vertex AI on this machine: the strict stand-ins for a run file's project and bucket.

    make rehearse config=configs/mine.yaml args='gcp.project=my-project'

What another terminal submits is checked as strictly as the tests check it, and then goes through its steps by itself,
one each time that somebody asks how it stands. Nothing is prepared and nothing is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.cloud.aiplatform_v1.types import PipelineJob

from pipelines.check import EXAMPLE_PROJECT
from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.courses import Move, tasks_of
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.runs import DONE, TRAINING
from trainer.errors import run_main
from vlmpipe.backends.vertex.bucket_checks import buckets_of
from vlmpipe.backends.vertex.client import ENDPOINT_VARIABLE
from vlmpipe.config.run_config import RunConfig, load_run_file


class SelfMovingVertex(FakeVertex):
    """A strict Vertex AI whose pipeline jobs run well."""

    def create(self, parent: str, job_id: str, body: bytes) -> PipelineJob:
        job = super().create(parent, job_id, body)
        moves = [Move(dict(one.tasks), one.job, later_s=one.later_s) for one in (*TRAINING, *DONE)]
        before = [name for name in ("plan-data", "prepare-chunks") if name in tasks_of(job)]  # with several data.tasks
        for number, name in enumerate(before):
            (last,) = (one.tasks for one in moves if one.tasks.get("prepare-data") == "RUNNING")
            ended = {task: state for task, state in last.items() if task != "prepare-data"}
            moves.insert(1 + number, Move({**ended, name: "RUNNING"}))
            last.clear()
            last.update({name: "SUCCEEDED", "prepare-data": "RUNNING"})
        self.courses.moves[job_id] = moves
        return job


@dataclass(frozen=True)
class Rehearsal:
    """The two servers."""

    vertex: SelfMovingVertex
    gcs: FakeGcs

    @property
    def environment(self) -> dict[str, str]:
        """Beside --api-endpoint, what a command needs to find them."""
        return {"STORAGE_EMULATOR_HOST": self.gcs.endpoint}


@contextlib.contextmanager
def rehearsal(config: RunConfig) -> Iterator[Rehearsal]:
    """For the run file's project, location and buckets. Raises ConfigError for one that cannot run on Vertex AI."""
    config.require_vertex()
    buckets = [named.bucket for named in buckets_of(config)]
    with SelfMovingVertex(config.gcp.project, config.gcp.location) as vertex, FakeGcs(buckets) as gcs:
        gcs.places |= {name: {"location": config.gcp.location.upper(), "locationType": "region"} for name in buckets}
        yield Rehearsal(vertex, gcs)


def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    parser.add_argument("config", help="run file")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    options = parser.parse_args(arguments)
    config, overrides = load_run_file(options.config, options.overrides), options.overrides
    if config.gcp.project == EXAMPLE_PROJECT:  # nobody's: submit would refuse it
        overrides = [*overrides, "gcp.project=my-project"]
        config = load_run_file(options.config, overrides)
    with rehearsal(config) as servers:
        told = {**servers.environment, ENDPOINT_VARIABLE: servers.vertex.endpoint}
        vlmpipe = Path(sys.executable).with_name("vlmpipe")
        here = vlmpipe.relative_to(Path.cwd()) if vlmpipe.is_relative_to(Path.cwd()) else vlmpipe
        print("A strict Vertex AI listens. In another terminal, where status and the others then find it too:\n")
        print(f"  export {' '.join(f'{name}={value}' for name, value in told.items())}")
        print(f"  {shlex.join([str(here), 'submit', options.config, *overrides])}\n", flush=True)
        print("Ctrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
