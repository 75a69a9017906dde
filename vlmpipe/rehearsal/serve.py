"""A rehearsal of Vertex AI on this machine: strict local servers for a run file's project and buckets.

    vlmpipe rehearse configs/mine.yaml gcp.project=my-project

What another terminal submits is checked as strictly as the tests check it, and then goes through its steps by itself,
one each time that a client asks for its state. Nothing is prepared and nothing is trained.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.cloud.aiplatform_v1.types import PipelineJob

from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.google_cloud.bucket_checks import buckets_of
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.platforms.compiled_spec import compiled_run_file, names_of_stages
from vlmpipe.platforms.example_values import EXAMPLE_PROJECT
from vlmpipe.platforms.table import platform_of
from vlmpipe.rehearsal.gcs_server import GcsServer
from vlmpipe.rehearsal.vertex.scripted_runs import DONE, TRAINING, Move, tasks_of
from vlmpipe.rehearsal.vertex.server import VertexServer


class SelfMovingVertex(VertexServer):
    """A strict Vertex AI whose pipeline jobs run well."""

    def create(self, parent: str, job_id: str, body: bytes) -> PipelineJob:
        job = super().create(parent, job_id, body)
        self.runs.moves[job_id] = moves_of(names_of_stages(compiled_run_file(job.pipeline_spec)), tasks_of(job))
        return job


def moves_of(stages: Sequence[str], tasks: set[str]) -> list[Move]:
    """All goes well. A stage begins when the gate of the one before has accepted."""
    moves: list[Move] = []
    for stage in stages:
        prefix = f"{stage}-" if stage else ""
        script = [Move(dict(move.tasks), later_s=move.later_s) for move in (*TRAINING, *DONE[:-1])]
        del script[-1].tasks["notify"]
        before = [name for name in ("plan-data", "prepare-chunks") if f"{prefix}{name}" in tasks]  # with data.tasks
        for number, name in enumerate(before):
            (last,) = (move.tasks for move in script if move.tasks.get("prepare-data") == "RUNNING")
            ended = {task: state for task, state in last.items() if task != "prepare-data"}
            script.insert(1 + number, Move({**ended, name: "RUNNING"}))
            last.clear()
            last.update({name: "SUCCEEDED", "prepare-data": "RUNNING"})
        named = [
            Move({f"{prefix}{name}": state for name, state in move.tasks.items()}, later_s=move.later_s)
            for move in script
        ]
        if moves:
            moves[-1].tasks |= named.pop(0).tasks
        moves += named
    moves[-1].tasks["notify"] = "RUNNING"
    return [*moves, DONE[-1]]


@dataclass(frozen=True)
class Rehearsal:
    """The two servers."""

    vertex: SelfMovingVertex
    gcs: GcsServer

    @property
    def environment(self) -> dict[str, str]:
        """Beside --api-endpoint, what a command needs to find them."""
        return {"STORAGE_EMULATOR_HOST": self.gcs.endpoint}


@contextlib.contextmanager
def rehearsal(config: RunConfig) -> Iterator[Rehearsal]:
    """For the run file's project, location and buckets. Raises ConfigError for one that cannot run on Vertex AI."""
    platform_of("vertex").check(config)
    buckets = [named.bucket for named in buckets_of(config)]
    vertex = SelfMovingVertex(config.gcp.project, config.gcp.location)
    with vertex, GcsServer(buckets) as gcs:
        gcs.places |= {name: {"location": config.gcp.location.upper(), "locationType": "region"} for name in buckets}
        yield Rehearsal(vertex, gcs)


def serve(config: RunConfig, source: Sequence[str]) -> None:
    """Serve until Ctrl-C. `source` names the run file on the command line, with its overrides."""
    if config.gcp.project == EXAMPLE_PROJECT:  # no real project: submit would refuse it
        source = [*source, "gcp.project=my-project"]
        config = load_run_file(source[0], source[1:])
    with rehearsal(config) as servers:
        variables = {**servers.environment, ENDPOINT_VARIABLE: servers.vertex.endpoint}
        print("A strict Vertex AI listens. Submit to it from another terminal:\n")
        print(f"  export {' '.join(f'{name}={value}' for name, value in variables.items())}")
        print(f"  {shlex.join(['vlmpipe', 'submit', *source])}\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            print("Ctrl-C ends it.", flush=True)
            threading.Event().wait()
