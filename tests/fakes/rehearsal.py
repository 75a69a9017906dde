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

from google.cloud.aiplatform_v1.types import PipelineJob

from pipelines.config import RunConfig, load_run_file
from tests.fakes.gcs import FakeGcs
from tests.fakes.vertex import FakeVertex
from tests.fakes.vertex_courses import Move
from tests.vertex_runs import DONE, TRAINING
from trainer.errors import run_main


class SelfMovingVertex(FakeVertex):
    """A strict Vertex AI whose pipeline jobs run well."""

    def create(self, parent: str, job_id: str, body: bytes) -> PipelineJob:
        job = super().create(parent, job_id, body)
        self.courses.moves[job_id] = [Move(dict(one.tasks), one.job, later_s=one.later_s) for one in (*TRAINING, *DONE)]
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
    buckets = {
        uri.removeprefix("gs://").partition("/")[0]
        for uri in (config.gcp.pipeline_root, config.output.root_uri)
        if uri.startswith("gs://")
    }
    with SelfMovingVertex(config.gcp.project, config.gcp.location) as vertex, FakeGcs(sorted(buckets)) as gcs:
        yield Rehearsal(vertex, gcs)


def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    parser.add_argument("config", help="run file")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    options = parser.parse_args(arguments)
    with rehearsal(load_run_file(options.config, options.overrides)) as servers:
        variables = " ".join(f"{name}={value}" for name, value in servers.environment.items())
        command = shlex.join(["submit", options.config, *options.overrides])
        print("A strict Vertex AI listens. In another terminal:\n", flush=True)
        print(f"  {variables} vlmpipe --api-endpoint {servers.vertex.endpoint} {command}\n", flush=True)
        print("Ctrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
