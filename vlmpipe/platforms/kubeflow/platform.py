"""Kubeflow, as the rest of the program asks a platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vlmpipe.platforms.base import Order, Platform
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.run_settings import RunSettings
    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.order import JobOrder
    from vlmpipe.platforms.compiled import Compiled, Template
    from vlmpipe.platforms.kubeflow.graph import KubeflowGraph
    from vlmpipe.platforms.kubeflow.run import RunOnKubeflow
    from vlmpipe.platforms.kubeflow.schedules import KubeflowSchedule, KubeflowSchedules
    from vlmpipe.platforms.kubeflow.submit import SubmittedToKubeflow
    from vlmpipe.platforms.kubeflow.templates import PublishedToKubeflow
    from vlmpipe.records.registered import Registered
    from vlmpipe.serving.agreement import Agreement
    from vlmpipe.serving.questions import ValidationQuestion


class Kubeflow(Platform):
    """Runs of Kubeflow Pipelines, TrainJobs of Kubeflow Trainer and InferenceServices of KServe."""

    name, title = "kubeflow", "Kubeflow"

    def check(self, config: RunConfig) -> None:
        from vlmpipe.platforms.kubeflow.requirements import require_kubeflow

        require_kubeflow(config)

    def check_files(self, config: RunConfig) -> None:
        from vlmpipe.platforms.kubeflow.requirements import require_reached_files

        require_reached_files(config)

    def unused(self, config: RunConfig) -> list[Problem]:
        from vlmpipe.platforms.kubeflow.requirements import unused_on_kubeflow

        return unused_on_kubeflow(config)

    def unready(self, config: RunConfig) -> Iterator[Problem]:
        from vlmpipe.platforms.example_values import example_images

        yield from super().unready(config)
        yield from example_images(config)

    def root_uri(self, config: RunConfig) -> str:
        from vlmpipe.platforms.kubeflow.requirements import root_uri_of

        return root_uri_of(config)

    def graph(self) -> KubeflowGraph:
        from vlmpipe.platforms.kubeflow.graph import KubeflowGraph

        return KubeflowGraph()

    def run_job(self, order: JobOrder) -> str:
        from vlmpipe.platforms.kubeflow.jobs.job import run_on_kubeflow

        return run_on_kubeflow(order.display_name, order.spec(), labels=order.labels)

    def job_place(self, run_file: Mapping[str, object]) -> dict[str, str]:
        from vlmpipe.platforms.kubeflow.jobs.client import connection

        try:
            return {"namespace": connection()[1]}
        except ConfigError:  # outside of a cluster
            return {"namespace": ""}

    def is_over(self, job_name: str, place: Mapping[str, str]) -> bool | None:
        from vlmpipe.platforms.kubeflow.jobs.client import is_workflow_over

        return is_workflow_over(job_name, place["namespace"]) if place["namespace"] else None

    def deploy(
        self, run_uri: str, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        from vlmpipe.config.serving_container import arguments_of, require_deploy
        from vlmpipe.platforms.kubeflow.inference_service import FOLDER, InferenceService
        from vlmpipe.serving.agreement import measure_agreement, require_agreement

        deploy = require_deploy(run)
        service = InferenceService(deploy, run.kubeflow, arguments_of(run, FOLDER))
        with service.canary(registered.served_uri(deploy.quantized), run.run.run_id) as url:
            result = measure_agreement(questions, service.ask(url, run.model_name))
            require_agreement(result, deploy.min_agreement)
        return result, {"inference_service": deploy.endpoint, "traffic_percent": service.promote()}

    def find(self, name: str, *, root: str, project: str, location: str) -> RunOnKubeflow | None:
        from vlmpipe.platforms.kubeflow.run import RunOnKubeflow
        from vlmpipe.platforms.kubeflow.runs.names import kubeflow_run

        run = kubeflow_run(name)
        return RunOnKubeflow(run) if run else None

    def submit(self, order: Order) -> SubmittedToKubeflow:
        from vlmpipe.platforms.kubeflow.submit import submit_to_kubeflow

        return submit_to_kubeflow(order)

    def fetch(self, address: str, folder: Path) -> NoReturn:
        raise ConfigError(f"{address} is a pipeline of Vertex AI", expected="a run file for Kubeflow")

    def publisher(
        self, registry: str, tags: Sequence[str]
    ) -> tuple[str, Callable[[RunConfig, Compiled], PublishedToKubeflow]]:
        if tags:
            raise ConfigError(
                "--tag is given with --target kubeflow", expected="none: versions there have their fingerprint as name"
            )
        from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi
        from vlmpipe.platforms.kubeflow.submit import endpoint_of
        from vlmpipe.platforms.kubeflow.templates import publish_to_kubeflow

        def publish(config: RunConfig, compiled: Compiled) -> PublishedToKubeflow:
            return publish_to_kubeflow(KubeflowApi(endpoint_of(config), config.kubeflow.namespace), compiled)

        return self.title, publish

    def schedules(self, config: RunConfig) -> KubeflowSchedules:
        from vlmpipe.platforms.kubeflow.schedules import KubeflowSchedules
        from vlmpipe.platforms.kubeflow.submit import endpoint_of

        self.check(config)
        self.check_files(config)
        return KubeflowSchedules(endpoint_of(config), config.kubeflow.namespace, config.kubeflow.experiment)

    def wanted_schedule(
        self,
        config: RunConfig,
        settings: ScheduleConfig,
        template: Template | None,
        compile: Callable[[RunConfig, Path], Compiled],
    ) -> tuple[KubeflowSchedule, Path]:
        from vlmpipe.platforms.compiled import FOLDER
        from vlmpipe.platforms.kubeflow.schedules import wanted_recurring_run

        path = compile(config, FOLDER / f"{config.name}.scheduled.kubeflow.yaml").path
        return wanted_recurring_run(config.name, settings, path), path

    def meanwhile(self, settings: ScheduleConfig) -> str:
        which = "each" if settings.allow_queueing else "the latest"
        return f"of runs due while others are active, {which} starts afterwards"
