"""The training pipeline: one graph for every target.

    resolve-run -> prepare-data -> cache-features (job, when images have no features yet) -> train (job)
        -> sync-checkpoint -> evaluate (job) -> benchmark (job, with evaluate.lmms_eval) -> decide
        -> register-model (when accepted) -> deploy-model (with a section deploy)

With several stages, all steps but the last for each of them, in whose names the stage comes first. The next stage
begins where the one before was accepted; resolve-run sees whether an earlier attempt of the run has done that already.

A sweep (section sweep) ends otherwise. After the last stage's resolve-run its variants' data are prepared, each once,
and its jobs run side by side:

    open-sweep -> for each preparation: prepare-data -> cache-features (job)
        -> list-jobs -> for each job: train-variants (job) -> compare-variants

What a job leaves is turned into artifacts of the console by the step after it that runs anyway (sync-checkpoint of
training, decide of evaluation and benchmark): each step of its own is a machine that starts and pulls an image.

With a source replay: self, its answers come before prepare-data, from a job of the evaluation's machine when no run has
generated them before: choose-replay -> replay (job) -> collect-replay, or reuse-replay.

With evaluate.audit a further branch leaves sync-checkpoint, for which the gate does not wait: audit (job) ->
collect-audit.

With several data.tasks, plan-data and that many prepare-chunks at once come before prepare-data; all inside an exit
handler, notify, and with notify.email a second exit task beside it, mail. Caching of steps is off everywhere: the
service's own key ignores image digests and environment, and prepared data and features are addressed by their content
anyway.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping

from kfp import dsl
from kfp.dsl import ExitHandler, PipelineTask
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_channel import PipelineChannel

from vlmpipe.components.audit.collect_audit import collect_audit
from vlmpipe.components.decide import decide
from vlmpipe.components.deploy_model import deploy_model
from vlmpipe.components.jobs.collect_features import collect_features
from vlmpipe.components.notify import notify
from vlmpipe.components.plan_data import plan_data
from vlmpipe.components.prepare_chunks import prepare_chunks
from vlmpipe.components.prepare_data import prepare_data
from vlmpipe.components.register_model import register_model
from vlmpipe.components.replay.choose_replay import choose_replay
from vlmpipe.components.replay.collect_replay import collect_replay
from vlmpipe.components.replay.reuse_replay import reuse_replay
from vlmpipe.components.resolve_run import resolve_run
from vlmpipe.components.reuse_features import reuse_features
from vlmpipe.components.runtime.parameters import compiled_settings, console_docstring, console_signature
from vlmpipe.components.stages.reuse_stage import reuse_stage
from vlmpipe.components.sweep.compare_variants import compare_variants
from vlmpipe.components.sweep.list_jobs import list_jobs
from vlmpipe.components.sweep.open_sweep import open_sweep
from vlmpipe.components.sweep.prepare_variant import prepare_variant
from vlmpipe.components.sweep.run_sweep_job import run_sweep_job
from vlmpipe.components.sync_checkpoint import sync_checkpoint
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.sweep import SweepConfig
from vlmpipe.job_spec.build import Job, job_settings, step_of
from vlmpipe.planner.steps.disks import compiled_disks
from vlmpipe.platforms.graph import Graph
from vlmpipe.platforms.table import platform_of

SUMMARY = "Data preparation, feature caching, distributed training, evaluation and gated registration of one model."


def build(config: RunConfig, target: str) -> BaseComponent:
    """The pipeline of `config` for `target`, ready to compile or, on the local target, to call.

    Raises ConfigError when the run file lacks what the target needs.
    """
    platform, runs = platform_of(target), config.stage_runs()
    for run_config in runs.values():
        platform.check(run_config)
    place = platform.graph()
    disks = {stage: {} if platform.is_here else compiled_disks(run_config) for stage, run_config in runs.items()}
    steps = _Steps(config, place, disks=disks[list(runs)[-1]])
    root_uri = platform.root_uri(config)
    job_name, signature = place.run_name(), console_signature(config)

    def run(parameters: Mapping[str, PipelineChannel]) -> None:
        with contextlib.ExitStack() as accepted:  # a stage is inside the condition of the one before
            for stage, run_config in runs.items():
                of_stage = _Steps(run_config, place, stage, disks=disks[stage])
                resolved = of_stage.add(
                    resolve_run,
                    compiled=compiled_settings(config, target, root_uri, stage, disks),
                    job_name=job_name,
                    **parameters,
                ).outputs
                is_last = stage == list(runs)[-1]
                if is_last and config.sweep:
                    of_stage.sweep(config.sweep, resolved["run_uri"], target)
                    return
                evaluated = of_stage.train(resolved) if is_last else of_stage.train_once(resolved)
                # After both branches of a stage: kfp.local takes a condition on what joins branches as not met.
                decision = of_stage.add(decide, run_uri=resolved["run_uri"], gcp_resources=evaluated)
                is_accepted = decision.outputs["Output"] == "accepted"
                accepted.enter_context(dsl.If(is_accepted, name=of_stage.named("accepted")))
            registered = steps.add(register_model, run_uri=resolved["run_uri"])
            if config.deploy:
                steps.add(deploy_model, run_uri=resolved["run_uri"], where=target).after(registered)

    def training(*channels: PipelineChannel) -> None:
        parameters = dict(zip(signature.parameters, channels, strict=True))
        closing = steps.add(
            notify,
            run_id=parameters["run_id"],
            job_name=job_name,
            root_uri=root_uri,
            webhook=config.notify.webhook,
            last_step=last_step(config),
        )
        with dsl.ExitHandler(closing, name="run") as steps_of_run:
            run(parameters)
        steps.add_mail(steps_of_run)

    training.__signature__ = signature  # type: ignore[attr-defined]
    training.__doc__ = console_docstring(config, SUMMARY)
    return dsl.pipeline(training, name=config.name, description=SUMMARY)


def last_step(config: RunConfig) -> str:
    """The step that completes an accepted run."""
    if config.sweep:
        return "compare-variants"
    return "deploy-model" if config.deploy else "register-model"


class _Steps:
    """Adds steps to the pipeline under construction, with the same names on every target."""

    def __init__(self, config: RunConfig, target: Graph, stage: str = "", *, disks: Mapping[str, int]) -> None:
        """`disks`: GB of the boot disks of steps that need more than steps have."""
        self._config, self._target, self._stage, self._disks = config, target, stage, disks
        self._mail = target.mail_step(config)

    def add(self, function: Callable[..., object], *, name: str = "", **inputs: object) -> PipelineTask:
        """A step that runs `function` on the pipeline image."""
        step = name or function.__name__.replace("_", "-")
        component = self._target.own_step(self._config, function, step, self._disks.get(step))
        return self._add(component, step, inputs)

    def named(self, name: str) -> str:
        """The name of a step or group of this stage."""
        return f"{self._stage}-{name}" if self._stage else name

    def train(self, resolved: Mapping[str, PipelineChannel]) -> PipelineChannel:
        """The steps from the prepared data to the evaluation. Returns what the last job hands on, for decide."""
        run_uri = resolved["run_uri"]
        prepared = self.prepare(run_uri)
        with dsl.If(prepared.outputs["features"] == "encode", name=self.named("features-missing")):
            encoding = self.add_job("cache_features", pools=resolved["features_pools"], run_uri=run_uri)
            left = encoding.outputs["gcp_resources"]
            encoded = self.add(collect_features, name="collect-cache-features", run_uri=run_uri, gcp_resources=left)
        with dsl.Else(name=self.named("features-there")):
            reused = self.add(reuse_features, run_uri=run_uri, features=prepared.outputs["features"])
        # Both branches hand on the run's folder: taking it is what makes training wait for the branch that ran.
        with_features = dsl.OneOf(encoded.outputs["Output"], reused.output)
        training_job = self.add_job("train", pools=resolved["train_pools"], run_uri=with_features)
        trained = training_job.outputs["gcp_resources"]
        exported = self.add(sync_checkpoint, run_uri=run_uri, gcp_resources=trained).outputs["Output"]
        evaluation = self.add_job("evaluate", pools=resolved["evaluate_pools"], run_uri=exported)
        if self._config.evaluate.audit:
            auditing = self.add_job("audit", pools=resolved["audit_pools"], run_uri=exported)
            self.add(collect_audit, run_uri=run_uri, gcp_resources=auditing.outputs["gcp_resources"])
        if self._config.evaluate.lmms_eval is None:
            return evaluation.outputs["gcp_resources"]
        benchmarking = self.add_job("benchmark", pools=resolved["benchmark_pools"], run_uri=exported)
        return benchmarking.after(evaluation).outputs["gcp_resources"]  # it adds to what the evaluation writes

    def sweep(self, sweep: SweepConfig, run_uri: PipelineChannel, target: str) -> None:
        """The steps from the variants' data to their comparison. One item of a loop goes to each input of its steps:
        see `vlmpipe.components.runtime.prepared_data.shares_of`."""
        opened = self.add(open_sweep, run_uri=run_uri)
        with dsl.ParallelFor(opened.output, name=self.named("preparations"), parallelism=sweep.parallelism) as of_data:
            prepared = self.add(prepare_variant, name="prepare-data", run_uri=of_data)
            encoded = self.add_sweep_job("cache-features", of_data, target).after(prepared)
        jobs = self.add(list_jobs, run_uri=run_uri, prepared=dsl.Collected(encoded.output))
        with dsl.ParallelFor(jobs.output, name=self.named("jobs"), parallelism=sweep.parallelism) as job:
            trained = self.add_sweep_job("train-variants", job, target)
        self.add(compare_variants, run_uri=run_uri, jobs=dsl.Collected(trained.output))

    def add_sweep_job(self, step: str, job: PipelineChannel, target: str) -> PipelineTask:
        """A step that runs one job of a sweep."""
        return self.add(run_sweep_job, name=step, job=job, step=step, target=target)

    def train_once(self, resolved: Mapping[str, PipelineChannel]) -> PipelineChannel:
        """Train the stage unless an earlier attempt of the run was accepted: no machine starts for a finished stage."""
        run_uri = resolved["run_uri"]
        with dsl.If(resolved["stage_state"] == "open", name=self.named("open")):
            evaluated = self.train(resolved)
        with dsl.Else(name=self.named("done")):
            reused = self.add(reuse_stage, run_uri=run_uri)
        return dsl.OneOf(evaluated, reused.output)

    def add_mail(self, steps_of_run: ExitHandler) -> None:
        """The step that writes to notify.email: an exit task beside notify. None without addresses, and on targets that
        send no mail.

        No exit handler around another: kfp refuses that, and does not see it where a pipeline lies between.
        """
        if self._mail is None:
            return
        mail = self._add(self._mail, "mail", {"recipients": list(self._config.notify.email)})
        mail.after(steps_of_run).ignore_upstream_failure()

    def replay(self, run_uri: PipelineChannel) -> PipelineChannel:
        """The steps of the start model's answers, a source of the data: they are generated if no run did it before.
        Returns the run's folder."""
        chosen = self.add(choose_replay, run_uri=run_uri)
        with dsl.If(chosen.outputs["replay"] == "answer", name=self.named("replay-missing")):
            job = self.add_job("replay", pools=chosen.outputs["pools"], run_uri=run_uri)
            left = job.outputs["gcp_resources"]
            answered = self.add(collect_replay, run_uri=run_uri, gcp_resources=left)
        with dsl.Else(name=self.named("replay-there")):
            reused = self.add(reuse_replay, run_uri=run_uri, replay=chosen.outputs["replay"])
        return dsl.OneOf(answered.outputs["Output"], reused.output)

    def prepare(self, run_uri: PipelineChannel) -> PipelineTask:
        """prepare-data; with several data.tasks, after as many tasks that prepare the chunks."""
        if self._config.data.replay:
            run_uri = self.replay(run_uri)
        if self._config.data.tasks == 1:
            return self.add(prepare_data, run_uri=run_uri)
        planned = self.add(plan_data, run_uri=run_uri)
        with dsl.ParallelFor(planned.output, name=self.named("shares")) as share:
            shares = self.add(prepare_chunks, share=share)
        return self.add(prepare_data, run_uri=run_uri).after(shares)

    def add_job(self, job: Job, *, pools: PipelineChannel, run_uri: PipelineChannel) -> PipelineTask:
        """A step that runs a CustomJob with these worker pools."""
        inputs = {
            **job_settings(self._config, job).inputs(),
            "worker_pool_specs": pools,
            "base_output_directory": run_uri,
        }
        component = self._target.job_step(self._config, job)
        if "target" in (component.component_spec.inputs or ()):
            inputs["target"] = self._target.target
        return self._add(component, step_of(job), inputs)

    def _add(self, component: BaseComponent, name: str, inputs: dict[str, object]) -> PipelineTask:
        # A task is named after its component, which would give custom-training-job-3 on one target and run-job-3 on
        # another: with a copy under the step's own name, graphs, logs and the console show "train" everywhere.
        named = copy.copy(component)
        named.component_spec = copy.copy(component.component_spec)
        named.component_spec.name = self.named(name)
        task = named(**inputs).set_caching_options(False)
        self._target.configure_task(self._config, task, name, self._stage, self._disks.get(name))
        return task
