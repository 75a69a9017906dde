"""`vlmpipe check`: finds errors of a run in seconds, offline, before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Literal

from vlmpipe.catalog.machines import unknown_region
from vlmpipe.config.rules.warnings import rates_without_effect
from vlmpipe.config.run_config import RunConfig, warnings
from vlmpipe.config.sections.sweep import baseline_of, variants_of
from vlmpipe.config.target_requirements import require_reached_files, require_vertex
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.pipelines.checks.data_look import look_at_source, samples_of
from vlmpipe.pipelines.checks.deepspeed_values import deepspeed_verdict
from vlmpipe.pipelines.checks.packages_look import extras_of_image, missing_here
from vlmpipe.pipelines.checks.readiness import EXAMPLE_PROJECT
from vlmpipe.pipelines.checks.weights_look import look_at_weights
from vlmpipe.planner.chat_template import prove_chat_template
from vlmpipe.planner.cost.cron import require_starts
from vlmpipe.planner.image_token_limit import image_token_limit
from vlmpipe.planner.serving import doubts, served_model, unservable
from vlmpipe.runs.local.run import require_writable
from vlmpipe.trainer.config.data import OWN_FORMAT
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.extras import install_command
from vlmpipe.trainer.models.hub_errors import without_hub
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.file_systems import limits_of
from vlmpipe.trainer.storage.user_folders import expanded

if TYPE_CHECKING:
    from vlmpipe.job_spec.rules import Violation

LEAST_FREE_GIB = 2
# A longest wait, a restart, an image by tag: `vlmpipe.config.run_config.warnings` has them in the run file's terms.
RUN_FILE_WARNINGS = ("VP405", "VP407", "VP603")


@dataclass(frozen=True)
class Finding:
    """The result of one check. `code` is the exit code of a failure."""

    subject: str
    state: Literal["ok", "warning", "failed", "unchecked"]
    text: str
    code: int = 0


def check_run(config: RunConfig) -> list[Finding]:
    """Check everything that needs no network, no GPU and no job; of several stages each."""
    with without_hub():
        return _check_offline(config)


def _check_offline(config: RunConfig) -> list[Finding]:
    findings = [Finding("run file", "ok", f"{config.name}: all fields are known and in range")]
    findings += of_stages({name: _check_training(run) for name, run in config.stage_runs().items()})
    if config.sweep:
        findings += _check_variants(config, findings)
    if config.tune:
        findings += _caught("tuning", _tuning, config)
    return [*findings, *_schedule(config), *(Finding("settings", "warning", str(one)) for one in warnings(config))]


def _check_variants(config: RunConfig, of_run: Sequence[Finding]) -> Iterator[Finding]:
    """What is wrong with variants of the sweep and not with the run file itself, once, by the first that has it."""
    assert config.sweep
    variants = variants_of(config.sweep)
    known = {(one.subject.rpartition(": ")[2], one.text) for one in of_run}
    for variant in variants:
        run = config.training_of(variant)
        settings = [str(one) for one in warnings(run) if one.field != "gate"]
        checked = _check_training(run, has_data=samples_of(run) != samples_of(config))
        found = [*checked, *(Finding("settings", "warning", text) for text in settings)]
        for one in found:
            if one.state in ("failed", "warning") and (one.subject, one.text) not in known:
                known.add((one.subject, one.text))
                yield replace(one, subject=f"variant {variant.name}: {one.subject}")
    trainings = f"{len(variants)} variants x {config.sweep.starts} starts, compared with {baseline_of(config.sweep)}"
    yield Finding("sweep", "ok", trainings)


def of_stages(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Findings by stage in one list: those of a stage name it, except where all stages have the same."""
    first = next(iter(found.values()))
    shared = {one for one in first if all(one in findings for findings in found.values())}
    own = [
        replace(one, subject=f"{stage}: {one.subject}")
        for stage, findings in found.items()
        for one in findings
        if one not in shared
    ]
    return [*(one for one in first if one in shared), *own]


def _check_training(config: RunConfig, *, has_data: bool = True) -> list[Finding]:
    checks: list[tuple[str, Callable[[RunConfig], Iterator[Finding]]]] = [
        ("model", _model),
        ("trainer", _trainer),
        ("packages", _packages),
        ("data", _data),
        ("benchmarks", _benchmarks),
        ("batch", _batch),
        ("deepspeed", _deepspeed),
        ("output", _output),
        ("registry", _registry),
        ("deploy", _deploy),
        ("port", _port),
        ("jobs", _jobs),
        ("vertex", _vertex),
    ]
    asked = [one for one in checks if has_data or one[0] != "data"]
    return [finding for subject, check in asked for finding in _caught(subject, check, config)]


def _caught(subject: str, check: Callable[[RunConfig], Iterator[Finding]], config: RunConfig) -> Iterator[Finding]:
    """The findings of a check; the last one is its failure."""
    try:
        yield from check(config)
    except UserError as error:
        yield Finding(subject, "failed", error.text(), int(error.code))


def exit_code(findings: list[Finding]) -> int:
    """0, or the code of the first failure."""
    return next((finding.code or ExitCode.CONFIG for finding in findings if finding.state == "failed"), ExitCode.OK)


def _model(config: RunConfig) -> Iterator[Finding]:
    model = config.model
    for field, part in model.sources.items():
        name = "model" if field == "pretrained" else field.replace("_", " ")
        yield (Finding(name, *look_at_weights(part)) if part else Finding(name, "ok", "a new one, with random weights"))
    tokenizer = model.tokenizer
    if tokenizer.startswith("train:"):
        yield Finding("tokenizer", "ok", f"{tokenizer.removeprefix('train:')} entries, trained on the run's own text")
    else:
        yield Finding("tokenizer", *look_at_weights(model.tokenizer_source))
    try:
        yield from _chat_template(config)
    except UserError as error:
        yield Finding("chat template", "failed", error.text(), int(error.code))
        return
    try:
        text = image_token_limit(model, config.data)
    except ConfigError as error:
        yield Finding("image tokens", "failed", error.text(), ExitCode.CONFIG)
        return
    if text:
        yield Finding("image tokens", "ok", text)
    yield from _plan(config)


def _trainer(config: RunConfig) -> Iterator[Finding]:
    """Whether a training program of one's own could start on this machine."""
    if trainer := config.train.trainer:
        from vlmpipe.trainer.external.dry_start import require_startable

        try:
            yield Finding("trainer", "ok", f"{trainer.name}: {require_startable(trainer)}")
        except UserError as error:
            is_elsewhere = (trainer.image_uri or config.cluster.image_uri) and not trainer.python
            if not is_elsewhere:
                raise
            yield Finding("trainer", "unchecked", f"{trainer.name} starts in its image, not here: {error.found}")
        if trainer.resume_args and not trainer.resume_as_model and trainer.self_launching:
            text = f"{trainer.name} resumes without train.trainer.resume_as_model: transformers may then leave weights "
            text += "of a vision-language model out (see the log for missing keys)"
            yield Finding("trainer", "warning", text)


def _packages(config: RunConfig) -> Iterator[Finding]:
    """What later steps need of this machine, and of the trainer's image."""
    is_only_here = bool(list(_missing_for_vertex(config)))
    missing = list(missing_here(config))
    for need, module in missing:
        text = (
            f"{need.field} needs {module} in step {need.step}: {install_command(need.extra)} for a run on this machine"
        )
        yield Finding("packages", *(("failed", text, ExitCode.UNAVAILABLE) if is_only_here else ("warning", text)))
    if not missing:
        yield Finding("packages", "ok", "every step has the packages that the run file needs, on this machine")
    if not is_only_here:
        for extra, field in extras_of_image(config).items():
            text = f"{field} needs a trainer image of make build EXTRAS={extra}; what is in an image is not looked at"
            yield Finding("packages", "unchecked", text)


def _chat_template(config: RunConfig) -> Iterator[Finding]:
    """What the chat template allows, if its files are on this machine."""
    name, proof = config.data.chat_format(config.model), prove_chat_template(config.model, config.data)
    if proof:
        yield Finding("chat template", "ok", f"{name}: {proof.described()}")
    elif name != OWN_FORMAT:
        yield Finding("chat template", "unchecked", f"{name} of {config.model.tokenizer} is proved with the data")


def _plan(config: RunConfig) -> Iterator[Finding]:
    """What planning finds wrong: with the model, built on the meta device, and with the machines' memory.

    The machines are those of Vertex AI, so of a run file that can only be run here their memory is a warning.
    """
    if not config.train.epochs:
        yield Finding("parameters", "ok", "none are trained: train.epochs is 0")
        return
    from vlmpipe.planner.plan import plan_run
    from vlmpipe.planner.time.time_limit import time_limit_note

    on_vertex = not list(_missing_for_vertex(config))
    try:
        plan = plan_run(config)
    except UserError as error:
        yield Finding("parameters", "failed", error.text(), int(error.code))
        return
    if plan.model:
        shape = plan.model.shape
        text = f"{shape.trainable_parameters:,} of {shape.total_parameters:,} are trained"
        if plan.trainer:
            text = f"{shape.total_parameters:,}; {plan.trainer} decides which are trained"
        yield Finding("parameters", "ok", text)
        yield from (Finding("settings", "warning", str(one)) for one in rates_without_effect(config, shape))
    else:
        yield Finding("parameters", "unchecked", plan.notes[-1])
    if plan.compiling:
        yield Finding("compile", "ok", f"{plan.compiling.state}: {plan.compiling.why}")
    state: Literal["failed", "warning"] = "failed" if on_vertex else "warning"
    for text in plan.estimate_errors:
        yield Finding("plan", state, text, ExitCode.CONFIG if on_vertex else ExitCode.OK)
    if on_vertex and plan.time and (text := time_limit_note(config, plan.time.train_hours)):
        yield Finding("plan", "warning", text)


def _data(config: RunConfig) -> Iterator[Finding]:
    sources = [config.data.of_source(source) for source in config.data.all_sources]
    for data in sources:
        yield Finding("data", *look_at_source(config, data, len(sources)))


def _benchmarks(config: RunConfig) -> Iterator[Finding]:
    """Whether benchmarks' files are what their formats say, and their images are there."""
    from vlmpipe.trainer.evaluation.benchmarks.readers import read_benchmark

    for benchmark in config.evaluate.benchmarks:
        if any(in_bucket(uri) for uri in (benchmark.uri, benchmark.annotations, benchmark.images)):
            yield Finding("benchmarks", "unchecked", f"{benchmark.name}: {benchmark.uri} is read by the step evaluate")
            continue
        questions = read_benchmark(benchmark, config.data.max_image_bytes)
        images = len({question.image.name for question in questions})
        text = f"{benchmark.name}: {len(questions):,} questions of {benchmark.format} about {images:,} images"
        yield Finding("benchmarks", "ok", text)
    if lmms_eval := config.evaluate.lmms_eval:
        from vlmpipe.trainer.evaluation.lmms_eval import require_ready

        tasks = ", ".join(lmms_eval.tasks)
        if in_bucket(lmms_eval.include_path) or not lmms_eval.python:
            yield Finding("benchmarks", "unchecked", f"lmms-eval reads {tasks} in the step benchmark")
        else:
            require_ready(lmms_eval)
            text = f"{lmms_eval.python} can be started; lmms-eval reads {tasks} in the step benchmark"
            yield Finding("benchmarks", "ok", text)


def _batch(config: RunConfig) -> Iterator[Finding]:
    cluster, train = config.cluster, config.train
    step_sequences = cluster.world_size // train.sequence_ranks * train.micro_batch_size
    each = f" / {train.sequence_ranks} with the same sequences" if train.sequence_ranks > 1 else ""
    yield Finding(
        "batch",
        "ok",
        f"{train.global_batch_size} packed sequences a step: nodes {cluster.replica_count} x processes "
        f"{cluster.processes}{each} x "
        f"train.micro_batch_size {train.micro_batch_size} x passes {train.global_batch_size // step_sequences}",
    )


def _deepspeed(config: RunConfig) -> Iterator[Finding]:
    if config.train.deepspeed:
        yield Finding("deepspeed", *deepspeed_verdict(config.train))


def _output(config: RunConfig) -> Iterator[Finding]:
    root_uri = config.root_uri("local").removeprefix("file://")
    if "://" in root_uri:
        yield Finding("output", "unchecked", f"{root_uri} is written when the run starts")
        return
    root = expanded(root_uri).absolute()
    free_gib = shutil.disk_usage(existing := require_writable(root)).free / 2**30
    state: Literal["ok", "warning"] = "ok" if free_gib >= LEAST_FREE_GIB else "warning"
    yield Finding("output", state, f"{root_uri} can be written, {free_gib:,.0f} GiB free")
    with os_errors(f"looking at the file system of {existing}"):
        if limits := limits_of(existing).text(root_uri):
            yield Finding("file system", "warning", limits)


def _registry(config: RunConfig) -> Iterator[Finding]:
    registry, gcp = config.register_.registry, config.gcp
    if registry.startswith("vertex://"):
        model = f"projects/{gcp.project}/locations/{gcp.location}/models/{registry.removeprefix('vertex://')}"
        text = f"{model}, alias {config.register_.alias}: Vertex AI is asked when the run decides"
        yield Finding("registry", "unchecked", text)
        if not config.root_uri("local").startswith("gs://"):
            text = f"a run on this machine cannot register in {registry}: it needs output.root_uri on gs://"
            is_only_here = bool(list(_missing_for_vertex(config)))
            yield Finding("registry", *(("failed", text, ExitCode.CONFIG) if is_only_here else ("warning", text)))
    elif in_bucket(registry):
        yield Finding("registry", "unchecked", f"{registry} is written when a model is accepted")
    elif registry:
        require_writable(expanded(registry.removeprefix("file://")).absolute())
        yield Finding("registry", "ok", f"{registry} can be written")


def _deploy(config: RunConfig) -> Iterator[Finding]:
    model = served_model(config)
    for text in unservable(config, model):
        yield Finding("deploy", "failed", text, ExitCode.CONFIG)
    for text in doubts(config, model):
        yield Finding("deploy", "warning", text)


def _port(config: RunConfig) -> Iterator[Finding]:
    if config.cluster.local_port:
        from vlmpipe.backends.local.environment import require_free_port

        require_free_port(config.cluster.local_port)
        yield Finding("port", "ok", f"{config.cluster.local_port} is free")


def _jobs(config: RunConfig) -> Iterator[Finding]:
    """A finding for each error, on Vertex AI also for warnings; the same one in several jobs is reported once."""
    from vlmpipe.job_spec.build import job_spec, job_violations, jobs_of, step_of, unknown_gpu_code

    paths = RunPaths(run_id=config.name, root_uri=config.root_uri("local"))
    reported: set[str] = set()
    for job in jobs_of(config):
        subject = f"job {step_of(job)}"
        found = [one for one in job_violations(config, job, paths.run_uri) if _concerns(config, one)]
        new = [one for one in found if one.text() not in reported]
        reported |= {one.text() for one in new}
        for one in new:
            state: Literal["failed", "warning"] = "failed" if one.severity == "error" else "warning"
            yield Finding(subject, state, one.text(), ExitCode.CONFIG if state == "failed" else ExitCode.OK)
        if not any(one.severity == "error" for one in found):
            replicas = ", ".join(str(pool["replica_count"]) for pool in job_spec(config, job, "")["worker_pool_specs"])
            yield Finding(subject, "ok", f"a valid CustomJob; replicas by pool: {replicas}")
        if unknown := unknown_gpu_code(config, job):
            yield Finding(subject, "unchecked", unknown)


def _concerns(config: RunConfig, violation: Violation) -> bool:
    """Whether to report it: warnings about Vertex AI do not concern a run file for a laptop."""
    if violation.severity == "error":
        return True
    return violation.code not in RUN_FILE_WARNINGS and not list(_missing_for_vertex(config))


def _missing_for_vertex(config: RunConfig) -> Iterator[str]:
    for require in (require_vertex, partial(require_reached_files, target="vertex")):
        try:
            require(config)
        except RunFileError as error:
            yield from map(str, error.problems)


def _tuning(config: RunConfig) -> Iterator[Finding]:
    from vlmpipe.pipelines.tune.search import require_tuning

    tune = require_tuning(config)
    yield Finding("tuning", "ok", f"{tune.max_trial_count} trials over {', '.join(tune.parameters)}")


def _schedule(config: RunConfig) -> Iterator[Finding]:
    """Yield findings about a schedule that starts nothing; runs can still be started by hand."""
    try:
        require_starts(config.schedule, datetime.now(UTC))
    except ConfigError as error:
        yield Finding("schedule", "warning", error.text())


def _vertex(config: RunConfig) -> Iterator[Finding]:
    if missing := list(_missing_for_vertex(config)):
        yield Finding("vertex", "unchecked", f"runs here, not on Vertex AI: {'; '.join(missing)}")
    elif odd := unknown_region(config.gcp.location):
        yield Finding("vertex", "warning", odd)
    elif config.gcp.project == EXAMPLE_PROJECT:
        yield Finding("vertex", "unchecked", f"complete, with the example values of the project {EXAMPLE_PROJECT}")
    else:
        yield Finding("vertex", "ok", f"project {config.gcp.project} in {config.gcp.location}")
    if not missing:
        from vlmpipe.pipelines.step_metadata import check_step_metadata

        try:
            check_step_metadata(config)
        except ConfigError as error:
            yield Finding("vertex", "failed", error.text(), ExitCode.CONFIG)
