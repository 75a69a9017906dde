"""`vlmpipe check`: finds errors of a run in seconds, offline, before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from vlmpipe.config.rules.warnings import shape_warnings
from vlmpipe.config.run_config import RunConfig, warnings
from vlmpipe.config.sections.sweep import baseline_of, variants_of
from vlmpipe.pipelines.checks.data_look import has_module, look_at_source, module_of, samples_of
from vlmpipe.pipelines.checks.deepspeed_values import deepspeed_verdict
from vlmpipe.pipelines.checks.finding import Finding, findings_of, of_stages
from vlmpipe.pipelines.checks.packages_look import extras_of_image, missing_here
from vlmpipe.pipelines.checks.platform_look import look_at_jobs, look_at_platforms, look_at_schedule
from vlmpipe.pipelines.checks.weights_look import look_at_weights
from vlmpipe.planner.chat_template import prove_chat_template
from vlmpipe.planner.image_token_limit import image_token_limit
from vlmpipe.planner.jobs.gate_bounds import bound_doubts
from vlmpipe.planner.jobs.replay import asked_about
from vlmpipe.planner.prepared_workload import questions_note
from vlmpipe.planner.serving import doubts, served_model, unservable
from vlmpipe.platforms.table import fits_priced_machines
from vlmpipe.runs.folders.run import require_writable
from vlmpipe.trainer.config.data import OWN_FORMAT
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.extras import install_command
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.file_systems import limits_of
from vlmpipe.trainer.storage.hub.client import without_hub
from vlmpipe.trainer.storage.outage import answering_soon
from vlmpipe.trainer.storage.user_folders import expanded

MIN_FREE_GIB = 2
SLEEPS = (
    "deploy.min_replicas is 0: after a pause, questions wait or are refused until a replica has started and loaded the "
    "model."
)
SLEEPS_AT_AN_ENDPOINT = " Vertex AI has it as a preview (v1beta1); on Kubeflow KServe must run in its Knative mode"


def check_run(config: RunConfig) -> list[Finding]:
    """Check everything that needs no network, no GPU and no job; of several stages each.

    Folders in buckets are asked for once.
    """
    with without_hub(), answering_soon():
        return _check_offline(config)


def _check_offline(config: RunConfig) -> list[Finding]:
    findings = [Finding("run file", "ok", f"{config.name}: all fields are known and in range")]
    findings += of_stages({name: _check_training(run) for name, run in config.stage_runs().items()})
    if config.sweep:
        findings += _check_variants(config, findings)
    if config.tune:
        findings += findings_of("tuning", _tuning, config)
    return [
        *findings,
        *look_at_schedule(config),
        *(Finding("settings", "warning", str(warning)) for warning in warnings(config)),
    ]


def _check_variants(config: RunConfig, of_run: Sequence[Finding]) -> Iterator[Finding]:
    """Findings of variants of the sweep and not of the run file itself, once, by the first that has it."""
    assert config.sweep
    variants = variants_of(config.sweep)
    known = {(finding.subject.rpartition(": ")[2], finding.text) for finding in of_run}
    for variant in variants:
        run = config.training_of(variant)
        settings = [str(warning) for warning in warnings(run) if warning.field != "gate"]
        checked = _check_training(run, has_data=samples_of(run) != samples_of(config))
        findings = [*checked, *(Finding("settings", "warning", text) for text in settings)]
        for finding in findings:
            if finding.state in ("failed", "warning") and (finding.subject, finding.text) not in known:
                known.add((finding.subject, finding.text))
                yield replace(finding, subject=f"variant {variant.name}: {finding.subject}")
    trainings = f"{len(variants)} variants x {config.sweep.starts} starts, compared with {baseline_of(config.sweep)}"
    yield Finding("sweep", "ok", trainings)


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
        ("jobs", look_at_jobs),
        ("platforms", look_at_platforms),
    ]
    asked = [check for check in checks if has_data or check[0] != "data"]
    return [finding for subject, check in asked for finding in findings_of(subject, check, config)]


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
    """Return whether a training program of one's own could start on this machine."""
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
    """Packages that later steps need of this machine, and of the trainer's image."""
    is_only_here = not fits_priced_machines(config)
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
    """Abilities of the chat template, if its files are on this machine."""
    name, proof = config.data.chat_format(config.model), prove_chat_template(config.model, config.data)
    if proof:
        yield Finding("chat template", "ok", f"{name}: {proof.described()}")
    elif name != OWN_FORMAT:
        yield Finding("chat template", "unchecked", f"{name} of {config.model.tokenizer} is proved with the data")


def _plan(config: RunConfig) -> Iterator[Finding]:
    """Findings of planning: on the model, built on the meta device, and with the machines' memory.

    The machines are those of Vertex AI, so of a run file that can only be run here their memory is a warning.
    """
    if not config.train.epochs:
        yield Finding("parameters", "ok", "none are trained: train.epochs is 0")
        return
    from vlmpipe.planner.plan import plan_run
    from vlmpipe.planner.time.time_limit import time_limit_note

    on_vertex = fits_priced_machines(config)
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
        doubts_of_shape = shape_warnings(config, shape)
        yield from (Finding("settings", "warning", str(problem)) for problem in doubts_of_shape)
    else:
        yield Finding("parameters", "unchecked", plan.notes[-1])
    if plan.compiling:
        yield Finding("compile", "ok", f"{plan.compiling.state}: {plan.compiling.why}")
    doubts = {doubt.text: doubt.is_certain for doubt in bound_doubts(config, plan.load)}
    yield from (Finding("gate", "failed", text, ExitCode.CONFIG) for text, is_certain in doubts.items() if is_certain)
    yield from (Finding("gate", "warning", text) for text, is_certain in doubts.items() if not is_certain)
    state: Literal["failed", "warning"] = "failed" if on_vertex else "warning"
    for text in (text for text in plan.estimate_errors if text not in doubts):
        yield Finding("plan", state, text, ExitCode.CONFIG if on_vertex else ExitCode.OK)
    if on_vertex and plan.time and (text := time_limit_note(config, plan.time.train_hours)):
        yield Finding("plan", "warning", text)
    if on_vertex and plan.cost and plan.cost.requests_doubt:
        yield Finding("plan", "warning", plan.cost.requests_doubt)
    if plan.load and plan.model and config.data.share_prefix != "off":
        yield Finding("plan", "warning", questions_note(config, plan.model, plan.load))
    if plan.load and not plan.load.is_prepared and (text := plan.load.warmup_problem(config.train)):
        yield Finding("plan", "warning", text)


def _data(config: RunConfig) -> Iterator[Finding]:
    sources = [config.data.of_source(source) for source in config.data.all_sources if source.uri]
    may_be_sent = fits_priced_machines(config)
    for data in sources:
        module = module_of(data)
        if module and may_be_sent:
            text = f"{data.source}: gcp.pipeline_image must have {module} installed, which a run's first step imports"
            yield Finding("data", "unchecked", text)
            if not has_module(module):
                continue
        yield Finding("data", *look_at_source(config, data, len(sources)))
    if replay := config.data.replay:
        text = f"{replay.name}: the start model's answers are generated when the run starts; {asked_about(config)}"
        yield Finding("data", "unchecked", text)


def _benchmarks(config: RunConfig) -> Iterator[Finding]:
    """Return whether benchmarks' files are what their formats say, and their images are there."""
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
    shared = f" / {train.sequence_ranks} with the same sequences" if train.sequence_ranks > 1 else ""
    yield Finding(
        "batch",
        "ok",
        f"{train.global_batch_size} packed sequences a step: nodes {cluster.replica_count} x processes "
        f"{cluster.processes}{shared} x "
        f"train.micro_batch_size {train.micro_batch_size} x passes {train.global_batch_size // step_sequences}",
    )


def _deepspeed(config: RunConfig) -> Iterator[Finding]:
    if config.train.deepspeed:
        yield Finding("deepspeed", *deepspeed_verdict(config.train))


def _output(config: RunConfig) -> Iterator[Finding]:
    root_uri = config.output.root_uri.removeprefix("file://")
    if "://" in root_uri:
        yield Finding("output", "unchecked", f"{root_uri} is written when the run starts")
        return
    root = expanded(root_uri).absolute()
    free_gib = shutil.disk_usage(existing := require_writable(root)).free / 2**30
    state: Literal["ok", "warning"] = "ok" if free_gib >= MIN_FREE_GIB else "warning"
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
        if not config.output.root_uri.startswith("gs://"):
            text = f"a run on this machine cannot register in {registry}: it needs output.root_uri on gs://"
            is_only_here = not fits_priced_machines(config)
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
    if config.deploy and config.deploy.sleeps:
        yield Finding("deploy", "warning", SLEEPS + ("" if config.deploy.cloud_run else SLEEPS_AT_AN_ENDPOINT))


def _tuning(config: RunConfig) -> Iterator[Finding]:
    from vlmpipe.pipelines.tune.search import require_tuning

    tune = require_tuning(config)
    yield Finding("tuning", "ok", f"{tune.max_trial_count} trials over {', '.join(tune.parameters)}")
