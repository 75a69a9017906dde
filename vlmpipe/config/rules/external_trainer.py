"""Rules of a user's own training program (`train.trainer`): refused combinations, and fields that it does not use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.launch_commands import (
    node_doubts,
    parts_of,
    passes_arguments,
    process_doubts,
    runs_shell,
    starts_processes,
    takes_options_from,
    variable_in,
)
from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.external_trainer import WITH_ROLES
from vlmpipe.trainer.storage.model_folders import bucket_address

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

# Fields of train that the launcher and the evaluation read.
_OF_THE_LAUNCHER = {"trainer", "resume", "keep_checkpoints", "objective", "precision"}
# Fields that a placeholder may read and that may be null.
_MAY_BE_NULL = {
    "model.min_pixels": "a number of pixels",
    "model.max_pixels": "a number of pixels",
    "train.warmup_fraction": "a share of all steps, or {warmup_steps} in the command",
    "train.warmup_steps": "a number of steps, or {warmup_fraction} in the command",
}


def external_trainer_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the problems of a run file with train.trainer; none without it."""
    trainer, cluster = config.train.trainer, config.cluster
    if trainer is None:
        return
    if config.features.cache == "on":
        yield Problem(
            "features.cache", "found on with train.trainer, whose program encodes images itself; expected off"
        )
    if any((source.weight, source.samples, source.epochs) != (None, None, None) for source in config.data.sources):
        text = "found shares with train.trainer, whose program gets each sample once; expected sources without weight, "
        yield Problem("data.sources", f"{text}samples and epochs")
    if config.train.early_stopping:
        text = "found with train.trainer, whose program decides itself when it ends; expected null"
        yield Problem("train.early_stopping", text)
    if config.checkpoint.export == "best":
        text = "found best with train.trainer, whose program's result is what is exported; expected last"
        yield Problem("checkpoint.export", text)
    if config.data.train_share < 1:
        text = f"found {config.data.train_share:g} with train.trainer, whose program gets every sample; expected 1"
        yield Problem("data.train_share", text)
    if config.data.slices and trainer.evaluate_command:
        text = "found with train.trainer.evaluate_command, which evaluates in place of ours and is told no fields; "
        yield Problem("data.slices", f"{text}expected no slices, or our evaluation")
    if config.data.phases:
        yield Problem("data.phases", "found with train.trainer, whose program gets each sample once; expected none")
    if config.model.lora:
        text = "found with train.trainer, whose program has adapters of its own; expected null and train.trainer.result"
        yield Problem("model.lora", f"{text} hf-adapter")
    if config.tune:
        yield Problem("tune", "found with train.trainer, whose program reports no trials to Vertex AI; expected null")
    if cluster.reduction_server and not trainer.uses_allreduce:
        text = f"found with train.trainer.launch {trainer.launch}, which sums no gradients by NCCL's all-reduce, so "
        yield Problem("cluster.reduction_server", f"{text}reducers would idle; expected null")
    if trainer.launch == "horovod" and cluster.replica_count > 1:
        text = f"found horovod with {cluster.replica_count} nodes, which horovodrun reaches by ssh only; expected "
        yield Problem("train.trainer.launch", f"{text}cluster.replica_count 1, or launch torchrun")
    for field, expected in _MAY_BE_NULL.items():
        section, name = field.split(".")
        if field in trainer.used_settings and getattr(getattr(config, section), name) is None:
            yield Problem(field, f"is missing: a placeholder of train.trainer reads it; expected {expected}")
    yield from _role_problems(config)


def command_warnings(config: RunFields) -> Iterator[Problem]:
    """Yield what no shell replaces in the words of train.trainer, and numbers for a launcher that are not the job's."""
    trainer, cluster = config.train.trainer, config.cluster
    if trainer is None:
        return
    for name in ("command", "resume_args", "evaluate_command"):
        words = getattr(trainer, name)
        shell = runs_shell(trainer.command if name == "resume_args" else words)
        if variables := dict.fromkeys(filter(None, map(variable_in, () if shell else words))):
            text = f"has {', '.join(variables)}, which no shell replaces; expected values, [bash, -c, 'TEXT'], or for "
            yield Problem(f"train.trainer.{name}", f"{text}torchrun's options launch torchrun with the program alone")
    if trainer.resume_args and not passes_arguments(trainer.command):
        text = (
            'follows a shell\'s TEXT, where the program does not get it; expected "$@" after the program in TEXT, and '
        )
        yield Problem("train.trainer.resume_args", f"{text}one more word, such as sh, at the end of command")
    parts = parts_of(trainer.command)
    if starts_processes(parts) and not takes_options_from(cluster.env):
        doubts = [
            *process_doubts(parts, nodes=cluster.replica_count, per_node=cluster.processes, unit="processes of a node"),
            *node_doubts(parts, nodes=cluster.replica_count),
        ]
        for doubt in doubts:
            text = f"has {doubt.found}; expected {doubt.expected}; {doubt.fix}"
            yield Problem("train.trainer.command", text)


def _role_problems(config: RunFields) -> Iterator[Problem]:
    """Roles by position: no worker pool may be empty."""
    trainer, cluster = config.train.trainer, config.cluster
    assert trainer
    if trainer.launch not in WITH_ROLES:
        return
    roles = trainer.roles
    if roles.ps and cluster.replica_count < 2:
        text = f"found {roles.ps} with cluster.replica_count 1: parameter servers are worker pool 2, and pool 1, the "
        yield Problem("train.trainer.roles.ps", f"{text}workers, would be empty; expected 2 nodes or more")
    if roles.evaluator and not roles.ps:
        text = f"found {roles.evaluator} with no ps: evaluators are worker pool 3, and pool 2 would be empty; expected "
        yield Problem("train.trainer.roles.evaluator", f"{text}ps of at least 1, or evaluator 0")


def unused_settings(config: RunFields) -> Iterator[Problem]:
    """Settings of the run file that the program is not told."""
    trainer, train = config.train.trainer, config.train
    if trainer is None:
        return
    fields = train.model_fields_set - _OF_THE_LAUNCHER - {"optimizer"}
    fields_set = {f"train.{name}" for name in fields if getattr(train, name) is not None}
    fields_set |= {f"train.optimizer.{name}" for name in train.optimizer.model_fields_set}
    fields_set |= {"checkpoint.export_dtype"} if config.checkpoint.export_dtype == "bf16" else set()
    fields_set |= {f"model.{name}" for name in config.model.model_fields_set if name.startswith(("freeze", "train_"))}
    pretrained = config.model.pretrained
    if pretrained and pretrained.revision and not bucket_address(pretrained.weights):
        text = f"has no effect: the program is only told {pretrained.weights}, and takes what that holds; expected "
        yield Problem("model.pretrained.revision", f"{text}weights on gs://, which are compared with the revision")
    for field in sorted(fields_set - trainer.used_settings):
        yield Problem(field, "has no effect: no placeholder in train.trainer.command reads it")
