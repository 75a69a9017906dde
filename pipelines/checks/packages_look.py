"""The packages and programs that a run's later steps need, looked for before its first step.

A step that ends for a package after training has been paid for could have been known at the start. Decoders of videos
and documents are looked for where names of files or the beginnings of texts tell that there are any; what only later
records tell, `check` finds in a sample of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.pipelines.checks.data_look import has_module
from vlmpipe.pipelines.checks.media_look import names_documents, names_videos
from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE
from vlmpipe.trainer.config.sources.data_source import BIGQUERY
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.extras import extra_of, install_command

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

S3 = "s3://"
BIGQUERY_MODULE = "google.cloud.bigquery"
SERVING = ("fastapi", "uvicorn", "openai")


@dataclass(frozen=True)
class Need:
    """Modules that a field of the run file needs in one step."""

    field: str
    step: str
    modules: tuple[str, ...]
    applies: Callable[[RunConfig], bool]

    @property
    def extra(self) -> str:
        return "bigquery" if self.modules[0] == BIGQUERY_MODULE else extra_of(self.modules[0])


def _ours(applies: Callable[[RunConfig], bool]) -> Callable[[RunConfig], bool]:
    """Return `applies` limited to training by vlmpipe: a user's own program brings its own packages."""
    return lambda config: config.train.trainer is None and applies(config)


NEEDS = (
    Need("data.source", "prepare-data", (BIGQUERY_MODULE,), lambda config: BIGQUERY in _addresses(config)),
    Need("a video in the data", "prepare-data", ("av",), lambda config: names_videos(config.data)),
    Need("a document in the data", "prepare-data", ("pypdfium2",), lambda config: names_documents(config.data)),
    Need("an s3:// address", "the first step", ("boto3",), lambda config: S3 in _addresses(config)),
    Need("train.strategy", "train", ("deepspeed",), _ours(lambda config: config.train.strategy.startswith("zero"))),
    Need("model.lora", "train", ("peft",), _ours(lambda config: config.model.lora is not None)),
    Need("model.lora.quantize_base", "train", ("bitsandbytes",), _ours(lambda config: config.model.quantizes_base)),
    Need("train.float8", "train", ("torchao",), _ours(lambda config: config.train.float8 != "none")),
    Need("train.wandb", "train", ("wandb",), lambda config: bool(config.train.wandb.project)),
    Need("train.mlflow", "train", ("mlflow",), lambda config: bool(config.train.mlflow.tracking_uri)),
    Need("evaluate.quantize", "evaluate", (QUANTIZED_PACKAGE,), lambda config: config.evaluate.quantize is not None),
    Need("evaluate.lmms_eval", "benchmark", SERVING, lambda config: config.evaluate.lmms_eval is not None),
    Need("deploy", "deploy-model", SERVING, lambda config: config.deploy is not None),
)
# Extras of the images that make build makes. The benchmark's job has an image of its own, and elsewhere than on this
# machine deploy-model asks an endpoint.
IN_IMAGE = ("trainer", "data", "media", "s3", "pipelines", "pipelines,trainer", "serving")


def _addresses(config: RunConfig) -> str:
    """The addresses of the run file, in one text: which stores it reads and writes."""
    return " ".join([config.output.root_uri, config.register_.registry, *config.data.addresses().values()])


def needs_of(config: RunConfig) -> list[Need]:
    """Packages that the run file needs, of all stages."""
    runs = list(config.stage_runs().values())
    return [need for need in NEEDS if any(need.applies(run) for run in runs)]


def missing_here(config: RunConfig) -> Iterator[tuple[Need, str]]:
    """The needs of a run on this machine that it lacks, each with the first module that is not installed."""
    for need in needs_of(config):
        if lacks := [module for module in need.modules if not has_module(module)]:
            yield need, lacks[0]


def require_here(config: RunConfig) -> None:
    """Raise UserError (69) where a step of a run on this machine would end for want of a package or a program."""
    if missing := list(missing_here(config)):
        lines = [f"{need.field} needs the Python package {module} in step {need.step}" for need, module in missing]
        raise UserError(
            "packages are not installed:\n  " + "\n  ".join(lines),
            expected="every package of every step, before the first one",
            fix=install_command(",".join(dict.fromkeys(filter(None, (need.extra for need, _ in missing))))),
            code=ExitCode.UNAVAILABLE,
        )
    for run in config.stage_runs().values():
        if lmms_eval := run.evaluate.lmms_eval:
            from vlmpipe.trainer.evaluation.lmms_eval import require_ready

            require_ready(lmms_eval)
        if trainer := run.train.trainer:
            from vlmpipe.trainer.external.dry_start import require_startable

            require_startable(trainer)


def extras_of_image(config: RunConfig) -> dict[str, str]:
    """The extras that the trainer's image must have been built with, and the fields that need them."""
    extras: dict[str, str] = {}
    for need in needs_of(config):
        if need.extra not in IN_IMAGE:
            extras.setdefault(need.extra, need.field)
    return extras
