"""The toy as the rest of the program asks a platform. Its service is a folder of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.support.toy_platform.schedules import ToySchedule, ToySchedules
from tests.support.toy_platform.service import (
    TITLE,
    ToyJobs,
    ToyRun,
    ToySearch,
    ToySearchRequest,
    write,
)
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.schedule import ScheduleConfig
from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.job_spec.build import Job
from vlmpipe.job_spec.order import JobOrder
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.platforms.base import Look, Order, Platform, SearchOrder
from vlmpipe.platforms.compiled import Compiled, Template
from vlmpipe.platforms.graph import Graph, component_of
from vlmpipe.platforms.job_step import run_custom_job
from vlmpipe.platforms.requirements import require_files
from vlmpipe.records.registered import Registered
from vlmpipe.runs.submitted import RunRecord
from vlmpipe.serving.agreement import Agreement, measure_agreement, require_agreement
from vlmpipe.serving.openai import Answer
from vlmpipe.serving.questions import ValidationQuestion

BUCKET = "toy://"


class ToyGraph(Graph):
    target = "toy"

    def job_step(self, config: RunConfig, job: Job) -> object:
        return component_of(run_custom_job, config.gcp.pipeline_image)


@dataclass(frozen=True)
class ToySubmitted:
    started: ToyRun | None
    pipeline: Path

    def lines(self) -> list[str]:
        return [f"sent {self.pipeline.name}"]

    def as_json(self) -> dict[str, object]:
        return {"sent": self.started is not None, "pipeline": str(self.pipeline)}


@dataclass(frozen=True)
class ToyPublished:
    address: str

    def lines(self) -> list[str]:
        return [f"published {self.address}"]

    def as_json(self) -> dict[str, object]:
        return {"template": self.address}


class Toy(Platform):
    name, title = "toy", TITLE
    takes_jobs = True
    max_step_bytes = 1_000_000
    folder: ClassVar[Path]  # of the service, which a test sets
    answers: ClassVar[dict[str, str]] = {}  # of the deployed model, by question

    def check(self, config: RunConfig) -> None:
        if config.notify.email:
            raise RunFileError(
                "run file, for the toy", [Problem("notify.email", "found, expected none: it has no mail")]
            )

    def check_files(self, config: RunConfig) -> None:
        require_files(config, TITLE, lambda uri: uri.startswith(BUCKET), f"a {BUCKET} path")

    def look(self, config: RunConfig) -> Look:
        missing = list(self.missing(config))
        return Look("unchecked", "; ".join(map(str, missing))) if missing else Look("ok", "fits the toy")

    def root_uri(self, config: RunConfig) -> str:
        return str(self.folder / "bucket")

    def check_storage(self, config: RunConfig) -> list[str]:
        return ["the toy's bucket is a folder"]

    def graph(self) -> ToyGraph:
        return ToyGraph()

    def run_job(self, order: JobOrder) -> str:
        pools = parse_job_spec(order.spec()).worker_pool_specs
        return json.dumps({"toy": order.display_name, "pools": len(pools)})

    def job_place(self, run_file: Mapping[str, object]) -> dict[str, str]:
        return {"folder": str(self.folder)}

    def is_over(self, job_name: str, place: Mapping[str, str]) -> bool | None:
        return ToyRun(Path(place["folder"], f"{job_name}.json")).reader()().is_over

    def deploy(
        self, run_uri: str, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        replies = iter([self.answers.get(question.id, question.evaluated) for question in questions])
        result = measure_agreement(questions, lambda _chat, _tokens: Answer(next(replies), "stop"))
        require_agreement(result, 1.0)
        return result, {"toy": registered.model}

    def find(self, name: str, *, root: str, project: str, location: str) -> ToyRun | None:
        file = self.folder / f"{name}.json"
        return ToyRun(file) if file.is_file() else None

    def find_search(self, name: str, root: str) -> ToySearch | None:
        file = self.folder / f"{name}.search.json"
        return ToySearch(file) if file.is_file() else None

    def submit(self, order: Order) -> ToySubmitted:
        config, template = order.config, order.template
        compiled = template.compiled if template else order.compile(config, self.folder / "pipeline.yaml")
        if order.dry_run:
            return ToySubmitted(None, compiled.path)
        name = order.run_id or f"{config.name}-20260101-000000-abcdef"
        run = ToyRun(self.folder / f"{name}.json")
        write(run.file, state="running", log=["step 1"])
        root = self.root_uri(config)
        RunRecord(f"toy://runs/{name}", f"{root}/runs/{name}", 1.0, source=tuple(order.source), service="toy").write(
            name
        )
        return ToySubmitted(run, compiled.path)

    def jobs(self, project: str, location: str, service_account: str = "") -> ToyJobs:
        return ToyJobs(self.folder, f"{project}/{location}")

    def search(self, order: SearchOrder) -> ToySearchRequest:
        return ToySearchRequest(self.folder / f"{order.search_id}.search.json", order)

    def fetch(self, address: str, folder: Path) -> Template:
        name = address.rpartition("/")[2]
        path = self.folder / f"{name}.published.yaml"
        return Template(address, Compiled(path, name, 1, 0), load_run_file(self.folder / f"{name}.run.json"))

    def publisher(
        self, registry: str, tags: Sequence[str]
    ) -> tuple[str, Callable[[RunConfig, Compiled], ToyPublished]]:
        def publish(config: RunConfig, compiled: Compiled) -> ToyPublished:
            shutil.copy(compiled.path, self.folder / f"{config.name}.published.yaml")
            (self.folder / f"{config.name}.run.json").write_text(json.dumps(config.to_dict()))
            return ToyPublished(f"https://toy.example/{config.name}")

        return f"{TITLE}'s registry", publish

    def schedules(self, config: RunConfig) -> ToySchedules:
        return ToySchedules(self.folder)

    def wanted_schedule(
        self,
        config: RunConfig,
        settings: ScheduleConfig,
        template: Template | None,
        compile: Callable[[RunConfig, Path], Compiled],
    ) -> tuple[ToySchedule, Path]:
        compiled = template.compiled if template else compile(config, self.folder / "pipeline.yaml")
        return ToySchedule(config.name, settings.cron, compiled.fingerprint()), compiled.path

    def meanwhile(self, settings: ScheduleConfig) -> str:
        return "one more waits"
