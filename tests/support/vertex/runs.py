"""Names and helpers of tests that look at a run on Vertex AI. The fixtures are in vertex_fixtures.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from vlmpipe.rehearsal.vertex.scripted_runs import Move
from vlmpipe.trainer.records.step import StepRecord

JOB = "llava-7b-zero2-spot-1"
RUN = f"projects/test-project/locations/us-central1/pipelineJobs/{JOB}"
LINK = f"https://console.cloud.google.com/vertex-ai/locations/us-central1/pipelines/runs/{JOB}?project=test-project"


def put(bucket: FakeGcs, name: str, content: Any) -> None:
    path = f"vlmpipe/runs/{JOB}/{name}"
    bucket.client().bucket("example-bucket").blob(path).upload_from_string(json.dumps(content), checksum="crc32c")


def put_record(bucket: FakeGcs, step: str, state: str = "running", **fields: Any) -> None:
    put(bucket, f"steps/{step}.json", asdict(StepRecord(step, state, **fields)))


def course(vertex: FakeVertex, *moves: Move, begun: int = 0) -> None:
    """The moves that lie ahead; the first `begun` of them are made already."""
    vertex.runs.moves[JOB] = list(moves)
    for _ in range(begun):
        vertex.runs.advance(vertex.jobs[RUN])


def put_ladder(bucket: FakeGcs, *strategies: str, **last: Any) -> None:
    """run.json, and the capacity_fallback.json of that attempt: no option but the last, which has these fields, found
    machines."""
    put(bucket, "run.json", {})
    run_file = bucket.client().bucket("example-bucket").get_blob(f"vlmpipe/runs/{JOB}/run.json")
    why = "no machines within 600 s, job PENDING"
    options: list[dict[str, Any]] = [
        {"strategy": name, "token": "t", "outcome": "no capacity", "why": why, "usd": 0.0} for name in strategies[:-1]
    ]
    options.append({"strategy": strategies[-1], "token": "t", "usd": 9.5, **last})
    put(bucket, "capacity_fallback.json", {"of_run": str(run_file.generation), "attempts": options})
