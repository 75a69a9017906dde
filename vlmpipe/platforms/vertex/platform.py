"""Vertex AI, as the rest of the program asks a platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.platforms.base import Look, Order, Platform, SearchOrder

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.run_settings import RunSettings
    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.google_cloud.client import Place
    from vlmpipe.job_spec.order import JobOrder
    from vlmpipe.platforms.compiled import Compiled, Template
    from vlmpipe.platforms.vertex.graph import VertexGraph
    from vlmpipe.platforms.vertex.job_requests import VertexJobs
    from vlmpipe.platforms.vertex.run import RunOnVertex
    from vlmpipe.platforms.vertex.schedules import VertexSchedule, VertexSchedules
    from vlmpipe.platforms.vertex.search import VertexSearch
    from vlmpipe.platforms.vertex.submit import SubmittedToVertex
    from vlmpipe.platforms.vertex.templates import PublishedTemplate
    from vlmpipe.platforms.vertex.tuning_job import TuningJobRequest
    from vlmpipe.records.registered import Registered
    from vlmpipe.serving.agreement import Agreement
    from vlmpipe.serving.questions import ValidationQuestion


class Vertex(Platform):
    """Pipelines, custom jobs, schedules, endpoints and a registry of pipelines of Google's service."""

    name, title = "vertex", "Vertex AI"
    has_prices = takes_jobs = True
    max_step_bytes = 200_000  # "should not exceed 200KB" (Execution.metadata, v1)

    def check(self, config: RunConfig) -> None:
        from vlmpipe.platforms.vertex.requirements import require_vertex

        require_vertex(config)

    def check_files(self, config: RunConfig) -> None:
        from vlmpipe.platforms.vertex.requirements import require_reached_files

        require_reached_files(config)

    def look(self, config: RunConfig) -> Look:
        from vlmpipe.platforms.vertex.requirements import look_at

        return look_at(config, list(self.missing(config)))

    def unready(self, config: RunConfig) -> Iterator[Problem]:
        from vlmpipe.config.validation_errors import Problem
        from vlmpipe.platforms.example_values import EXAMPLE_PROJECT, example_images

        yield from super().unready(config)
        if config.gcp.project == EXAMPLE_PROJECT:
            yield Problem("gcp.project", f"found {EXAMPLE_PROJECT}, the shipped example's; expected your project")
        yield from example_images(config)

    def root_uri(self, config: RunConfig) -> str:
        return config.bucket_root_uri

    def graph(self) -> VertexGraph:
        from vlmpipe.platforms.vertex.graph import VertexGraph

        return VertexGraph()

    def run_job(self, order: JobOrder) -> str:
        from vlmpipe.job_spec.worker_pools import STEP_LABEL
        from vlmpipe.platforms.step_context import stop_as_error
        from vlmpipe.platforms.vertex.jobs.capacity_fallback import run_with_fallback

        with stop_as_error(order.labels.get(STEP_LABEL, "train")):
            return run_with_fallback(order)

    def job_place(self, run_file: Mapping[str, Any]) -> dict[str, str]:
        gcp = run_file.get("gcp") or {}
        return {"project": gcp.get("project", ""), "location": gcp.get("location", "")}

    def is_over(self, job_name: str, place: Mapping[str, str]) -> bool | None:
        if not (place["project"] and place["location"]):
            return None
        from vlmpipe.google_cloud.client import Place
        from vlmpipe.platforms.vertex.runs.client import OVER, Runs, state_of
        from vlmpipe.platforms.vertex.runs.names import Address

        where = Place(place["project"], place["location"])
        return state_of(Runs(where).get(Address(where, job_name))) in OVER

    def deploy(
        self, run_uri: str, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        from vlmpipe.config.serving_container import require_deploy
        from vlmpipe.google_cloud.client import Place
        from vlmpipe.platforms.vertex.endpoint import VertexEndpoint
        from vlmpipe.serving.agreement import measure_agreement, require_agreement

        deploy, gcp = require_deploy(run), run.gcp
        place = Place(gcp.project, gcp.location, gcp.job_service_account or gcp.service_account)
        if deploy.cloud_run:
            return self._deploy_on_cloud_run(place, run, registered, questions)
        endpoint = VertexEndpoint(place, deploy, labels=gcp.labels, encryption_key=gcp.encryption_spec_key_name)
        endpoint.require_public(questions, run.model_name)
        with endpoint.canary(registered.resource, run.run.run_id) as canary:
            result = measure_agreement(questions, endpoint.ask(canary, run.model_name))
            require_agreement(result, deploy.min_agreement)
        return result, {"endpoint": endpoint.name, "traffic_split": endpoint.promote(canary)}

    def _deploy_on_cloud_run(
        self, place: Place, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        from vlmpipe.config.serving_container import arguments_of, require_deploy
        from vlmpipe.platforms.vertex.cloud_run.service import CloudRunService
        from vlmpipe.serving.agreement import measure_agreement, require_agreement

        deploy, gcp = require_deploy(run), run.gcp
        service = CloudRunService(place, deploy, labels=gcp.labels, encryption_key=gcp.encryption_spec_key_name)
        service.require_usable(questions, run.model_name)
        model_uri = registered.served_uri(deploy.quantized)
        with service.canary(arguments_of(run, model_uri), run.run.run_id) as canary:
            result = measure_agreement(questions, service.ask(canary, run.model_name))
            require_agreement(result, deploy.min_agreement)
        record = {"service": service.name, "address": canary.service_address}
        return result, {**record, "traffic_split": service.promote(canary)}

    def find(self, name: str, *, root: str, project: str, location: str) -> RunOnVertex | None:
        from vlmpipe.platforms.vertex.run import RunOnVertex
        from vlmpipe.platforms.vertex.runs.names import address_of

        address = address_of(name, project=project, location=location)
        return RunOnVertex(address) if address else None

    def find_search(self, name: str, root: str) -> VertexSearch | None:
        from vlmpipe.platforms.vertex.search import search_on_vertex

        return search_on_vertex(name)

    def submit(self, order: Order) -> SubmittedToVertex:
        from vlmpipe.platforms.vertex.submit import submit_to_vertex

        return submit_to_vertex(order)

    def fetch(self, address: str, folder: Path) -> Template:
        from vlmpipe.platforms.vertex.templates import fetch

        return fetch(address, folder)

    def publisher(
        self, registry: str, tags: Sequence[str]
    ) -> tuple[str, Callable[[RunConfig, Compiled], PublishedTemplate]]:
        from vlmpipe.platforms.vertex.artifact_registry import Registry
        from vlmpipe.platforms.vertex.templates import all_tags, publish

        all_tags(tags)
        there = Registry(registry)
        return registry, lambda _, compiled: publish(there, compiled, tags)

    def schedules(self, config: RunConfig) -> VertexSchedules:
        from vlmpipe.google_cloud.client import Place, schedule_client
        from vlmpipe.platforms.vertex.requirements import require_own_project
        from vlmpipe.platforms.vertex.schedules import VertexSchedules

        self.check(config)
        require_own_project(config.gcp.project)
        return VertexSchedules(Place.of(config), schedule_client(config.gcp.location))

    def wanted_schedule(
        self,
        config: RunConfig,
        settings: ScheduleConfig,
        template: Template | None,
        compile: Callable[[RunConfig, Path], Compiled],
    ) -> tuple[VertexSchedule, Path]:
        from vlmpipe.platforms.compiled import FOLDER
        from vlmpipe.platforms.vertex.pipeline_job import prepare
        from vlmpipe.platforms.vertex.schedules import wanted_schedule

        if template:
            compiled, template_uri = template.compiled, template.address
        else:
            compiled, template_uri = compile(config, FOLDER / f"{config.name}.scheduled.yaml"), ""
        submission = prepare(config, compiled.path, job_id="", template_uri=template_uri)
        return wanted_schedule(submission, config.name, settings), compiled.path

    def meanwhile(self, settings: ScheduleConfig) -> str:
        return f"a run due while others are active {'waits' if settings.allow_queueing else 'is skipped'}"

    def jobs(self, project: str, location: str, service_account: str = "") -> VertexJobs:
        from vlmpipe.google_cloud.client import Place
        from vlmpipe.platforms.vertex.job_requests import VertexJobs

        return VertexJobs(Place(project, location, service_account))

    def search(self, order: SearchOrder) -> TuningJobRequest:
        from vlmpipe.platforms.vertex.tuning_job import TuningJobRequest

        return TuningJobRequest(order)

    def check_storage(self, config: RunConfig) -> list[str]:
        from vlmpipe.google_cloud.bucket_checks import require_buckets

        return require_buckets(config)
