"""First step of every run: merges pipeline parameters with the compiled run file into the run's `run.json`.

Changes made in the console are checked here, in seconds and on a cheap machine, before any job starts.
"""

from __future__ import annotations

import json
import os
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlmpipe.components.runtime.parameters import from_compiled, require_fixed, with_parameters
from vlmpipe.config.overrides import override_texts
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.stages import naming_stage, run_uri
from vlmpipe.config.sections.sweep import SweepConfig, Variant, variants_of
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.job_spec.build import worker_pools
from vlmpipe.job_spec.check import check_jobs
from vlmpipe.job_spec.forms import WorkerPool
from vlmpipe.platforms.table import platform_of
from vlmpipe.records.compiled import CompiledSettings
from vlmpipe.records.plan import PlannedRun
from vlmpipe.records.stage_folders import stage_run_id
from vlmpipe.registry.hub import require_token
from vlmpipe.runs.setting_differences import Differences
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.evaluation.benchmarks.readers import located, read_benchmark
from vlmpipe.trainer.external.dry_start import require_startable
from vlmpipe.trainer.secret_manager import use_hub_token, use_secrets
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.model_folders import bucket_address, revision_of
from vlmpipe.trainer.storage.records import write_run_file

if TYPE_CHECKING:
    from vlmpipe.planner.plan import Plan


@dataclass(frozen=True)
class Resolved:
    """Inputs of later steps: the run's folder and the worker pools of each job."""

    config: RunConfig
    run_uri: str
    features_pools: list[WorkerPool]
    train_pools: list[WorkerPool]
    evaluate_pools: list[WorkerPool]
    benchmark_pools: list[WorkerPool]  # empty without evaluate.lmms_eval
    audit_pools: list[WorkerPool]  # empty without evaluate.audit
    differences: Differences = field(default_factory=dict)  # from the compiled run file
    since_last_start: list[str] = field(default_factory=list)  # what an earlier start of this run had otherwise


def resolve(
    run_file: str,
    compiled: str,
    *,
    run_id: str = "",
    job_name: str = "",
    overrides: str = "",
    **parameters: str | int | float,
) -> Resolved:
    """Merge, check, plan and write `run.json` and `plan.json` into the run's folder.

    Args:
        run_file: the run file as a JSON text.
        compiled: `compiled_settings` of the pipeline.
        run_id: name of the run; empty takes `job_name`, the pipeline job's own.
        job_name: tells this submission from others of the run; empty makes each call one.
        overrides: JSON object of dotted keys, for example {"train.optimizer.weight_decay": 0.1}; empty for none.
        parameters: those of PARAMETER_FIELDS. One that equals its compiled default, or is blank, does not override the
            run file, which may have been replaced as well.

    Raises ConfigError, also where checkpoints of the run cannot be continued with these settings.
    """
    run_uri(compiled, run_id, job_name)  # checks the id
    settings = CompiledSettings.read(compiled)
    whole = with_parameters(run_file, settings, overrides, parameters)
    runs, stages = whole.stage_runs(), settings.stages
    if tuple(runs) != stages:
        raise ConfigError(
            f"the run file has the stages {', '.join(runs) or 'none'}",
            expected=f"those of the compiled pipeline: {', '.join(stages)}",
            fix="compile the run file again",
        )
    root_uri = settings.root_uri
    if not in_bucket(root_uri):
        root_uri = open_storage(root_uri).root_uri  # absolute: a job may run in another folder
    submission = job_name or uuid.uuid4().hex
    paths = {
        name: RunPaths(run_id=stage_run_id(run_id or job_name, name, stages), root_uri=root_uri, submission=submission)
        for name in stages
    }
    if root_uri.startswith("s3://"):
        from vlmpipe.trainer.storage.s3 import (  # not above: its library is an extra
            S3Storage,
            require_conditional_writes,
        )

        require_conditional_writes(S3Storage(root_uri))
    stage = settings.stage
    this, number = paths[stage], stages.index(stage)
    plans: dict[str, Plan | None] = {}
    if number == 0:  # nothing starts where a later stage could not
        for name in stages[1:]:
            with naming_stage(name):
                _, plans[name] = _checked(runs[name], settings, name, paths[name])
                open_source(runs[name].data)
                _with_benchmarks(runs[name], is_local=platform_of(settings.target).is_here)
    with naming_stage(stage):
        config, plans[stage] = _of_stage(runs, settings, stage, paths)
    from vlmpipe.runs.changed_settings import require_resumable  # not above: compiling needs none of it

    since_last_start = require_resumable(config, this)
    for name, plan in plans.items():
        if plan:
            PlannedRun.write_plan(open_storage(paths[name].run_uri), plan.as_dict())
    write_run_file(open_storage(this.run_uri), config.to_run_json(this))
    if whole.sweep and stage == stages[-1]:
        _open_variants(whole, whole.sweep, settings, paths)
    return Resolved(
        config=config,
        run_uri=this.run_uri,
        features_pools=worker_pools(config, "cache_features", this.run_uri),
        train_pools=worker_pools(config, "train", this.run_uri),
        evaluate_pools=worker_pools(config, "evaluate", this.run_uri),
        benchmark_pools=worker_pools(config, "benchmark", this.run_uri) if config.evaluate.lmms_eval else [],
        audit_pools=worker_pools(config, "audit", this.run_uri) if config.evaluate.audit else [],
        differences=from_compiled(whole, settings.run_file, stage),
        since_last_start=since_last_start,
    )


def _of_stage(
    runs: Mapping[str, RunConfig], settings: CompiledSettings, stage: str, paths: Mapping[str, RunPaths]
) -> tuple[RunConfig, Plan | None]:
    """The run file of a stage as its jobs get it, with its plan; a later one begins with the export before it."""
    config, before = runs[stage], list(runs)[: list(runs).index(stage)]
    if before:
        from vlmpipe.components.runtime.stage_start import (
            continued,  # not above: compiling needs this module, and no numpy
        )

        config = continued(config, paths[stage], [(runs[name], paths[name]) for name in before])
    config, plan = _checked(config, settings, stage, paths[stage])
    return _with_benchmarks(config, is_local=platform_of(settings.target).is_here), plan


def _open_variants(
    whole: RunConfig, sweep: SweepConfig, settings: CompiledSettings, paths: Mapping[str, RunPaths]
) -> None:
    """Check every variant, and write what its trainings read."""
    from vlmpipe.components.runtime.sweep_steps import write_sweep  # not above: as continued

    stage, trained = settings.stage, list[tuple[Variant, RunConfig]]()
    unfixed = settings.model_copy(update={"fixed": {settings.stage: {}}})
    for variant in variants_of(sweep):
        runs = whole.variant(variant).stage_runs()
        with naming_stage(variant.name, kind="variant"):
            trained.append((variant, _of_stage(runs, unfixed, stage, paths)[0]))
    write_sweep(paths[stage], sweep, trained)


def _with_benchmarks(config: RunConfig, *, is_local: bool) -> RunConfig:
    """Benchmarks with absolute local paths. Raises DataError for a wrong file now, and not after training."""
    benchmarks = tuple(located(benchmark) for benchmark in config.evaluate.benchmarks)
    for benchmark in benchmarks:
        read_benchmark(benchmark, config.data.max_image_bytes)
    lmms_eval = config.evaluate.lmms_eval
    if lmms_eval:
        from vlmpipe.trainer.evaluation.lmms_eval import (  # not above: compiling needs no numpy
            require_ready,
            task_files,
        )

        if is_local:
            lmms_eval = require_ready(lmms_eval)
        else:
            task_files(lmms_eval.include_path)
            lmms_eval = lmms_eval.model_copy(update={"python": ""})  # the image has its own
    changes = {"benchmarks": benchmarks, "lmms_eval": lmms_eval}
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)})


def _checked(
    config: RunConfig, settings: CompiledSettings, stage: str, paths: RunPaths
) -> tuple[RunConfig, Plan | None]:
    """The run file as its jobs get it, with its plan. Raises ConfigError where it cannot run."""
    require_fixed(config.to_dict(), settings.fixed[stage])
    platform = platform_of(settings.target)
    platform.check(config)
    platform.check_files(config)
    config = _with_registry(config, paths.root_uri)
    if config.train.trainer:
        config = _with_trainer(config, is_local=platform.is_here)
    use_hub_token(config.model.hub_token_secret)
    if platform.is_here:  # elsewhere only the jobs' own account may read them
        use_secrets(config.secrets)
    if config.register_.hub:  # not after hours of training
        require_token(config.register_.hub)
    config = _with_pinned_weights(config)
    elsewhere = not platform.is_here
    # On this machine nothing is paid for, and planning takes seconds: plan only where a setting depends on it.
    plan = None
    if config.train.epochs and (elsewhere or config.features.cache == "auto"):
        from vlmpipe.catalog.this_machine import this_machine
        from vlmpipe.planner.plan import plan_run  # not above: compiling needs this module, and no planner
        from vlmpipe.planner.steps.estimate import Stage

        place = Stage(
            is_first=stage == settings.stages[0],
            is_last=stage == settings.stages[-1],
            disks=settings.disks.get(stage, {}),
        )
        plan = plan_run(config, here=None if elsewhere else this_machine(), stage=place)
    if not elsewhere or config.plan.fail_on_error:
        check_jobs(config, paths.run_uri)
    if plan and elsewhere and config.plan.fail_on_error:
        _require_not_red(plan)
    if plan and platform.has_prices and config.cluster.max_spend_usd:
        require_prices(plan)
    return _with_decided_cache(config, plan), plan


def open_run_folder(run_file: str, root_uri: str, *, run_id: str, overrides: str = "", target: str = "local") -> str:
    """Check a run file (YAML or JSON text) and write `run.json` into <root_uri>/runs/<run_id>. Returns that folder.

    For steps in pipelines of others, where no compiled pipeline fixes any settings. Raises as `resolve` does.
    """
    platform_of(target)
    content = parse_yaml(run_file, "run_file")
    if not isinstance(content, dict):
        raise ConfigError(
            "run_file is not a run file", expected="a mapping with sections such as model, data and train"
        )
    compiled = CompiledSettings(target=target, root_uri=root_uri, fixed={"": {}})
    return resolve(json.dumps(content), compiled.text(), run_id=run_id, overrides=overrides).run_uri


def _require_not_red(plan: Plan) -> None:
    if plan.errors:
        settings = plan.memory.nearest[:1] if plan.memory else ()
        nearest = [text for setting in settings for text in override_texts(setting.change)]
        raise ConfigError(
            "\n".join(["the plan is red: this run would fail", *(f"  {error}" for error in plan.errors)]),
            expected="a plan without errors, before machines are paid for",
            fix=f"for example {shlex.join(nearest)}"
            if nearest
            else "see vlmpipe plan; plan.fail_on_error=false ignores it",
        )


def require_prices(plan: Plan) -> None:
    """Raise ConfigError where an option of the capacity fallback has no price: the limit would have no effect."""
    steps = (
        {term: plan.cost.by_term[term].steps for term in plan.cost.capacity_fallback}
        | {name: cost.steps for name, cost in plan.cost.elsewhere.items()}
        if plan.cost
        else {"any option": ()}
    )
    if open_terms := [
        term for term, costs in steps.items() if not any(cost.job == "train" and cost.usd_per_hour for cost in costs)
    ]:
        raise ConfigError(
            f"cluster.max_spend_usd is set, and what an hour of training costs on {', '.join(open_terms)} is not known",
            expected="a price for every option of cluster.capacity_fallback",
            fix="give prices with plan.prices_file, or leave cluster.max_spend_usd out",
        )


def _with_registry(config: RunConfig, root_uri: str) -> RunConfig:
    """A folder for the registry becomes absolute. Raises ConfigError where Vertex AI could not read the models."""
    registry = config.register_.registry
    if registry.startswith("vertex://"):
        if not root_uri.startswith("gs://"):
            raise ConfigError(
                f"register.registry is {registry}, and the run's models lie in {root_uri}",
                expected="output.root_uri on gs://: Vertex AI Model Registry keeps models in Cloud Storage",
                fix="set output.root_uri to a gs:// prefix, or register.registry to a folder",
            )
        return config
    if not registry or "://" in registry:
        return config
    register = config.register_.model_copy(update={"registry": open_storage(registry).root_uri})
    return config.model_copy(update={"register_": register})


def _with_trainer(config: RunConfig, *, is_local: bool) -> RunConfig:
    """train.trainer with the Python that it has on this machine; in the cloud its image has one.

    Raises ConfigError where the program could not start here, before its data is prepared.
    """
    trainer = config.train.trainer
    assert trainer
    python = os.path.abspath(trainer.python) if trainer.python and is_local else ""
    trainer = trainer.model_copy(update={"python": python})
    if is_local:
        require_startable(trainer)
    return config.model_copy(update={"train": config.train.model_copy(update={"trainer": trainer})})


def _with_pinned_weights(config: RunConfig) -> RunConfig:
    """Weights in buckets get the revision that is there now, so that a run that resumes takes no others.

    Raises ConfigError where the run file names another.
    """
    pinned = {
        name: part.model_copy(update={"revision": revision_of(address, part.revision)}).model_dump()
        for name, part in config.model.sources.items()
        if part and (address := bucket_address(part.weights))
    }
    if not pinned:
        return config
    model = ModelConfig.model_validate(config.model.model_dump() | pinned)
    return config.model_copy(update={"model": model})


def _with_decided_cache(config: RunConfig, plan: Plan | None) -> RunConfig:
    """`features.cache: auto` becomes the plan's choice; it stays auto if the plan has none."""
    if config.features.cache != "auto" or plan is None or plan.features_cache is None:
        return config
    features = config.features.model_copy(update={"cache": plan.features_cache.state})
    return config.model_copy(update={"features": features})
