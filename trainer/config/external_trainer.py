"""The run file's `train.trainer` section: a training program of the user's own in place of ours, and its contract.

The launcher fills in the placeholders of the command and judges the outcome by what the program leaves.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlmpipe.trainer.config.base import Positive, Section

DataFormat = Literal["messages", "llava", "trl", "llama-factory", "nemo", "webdataset", "tfrecord", "none"]
Launch = Literal["torchrun", "self", "each-node", "tensorflow", "horovod", "roles"]
Result = Literal["hf-model", "hf-adapter", "saved-model", "opaque"]
Word = Annotated[str, Field(min_length=1)]

FOLDERS = ("data", "model", "output", "checkpoints", "resume")
# Placeholder -> where its value is in the run file; "" for what follows from several fields.
SETTINGS = {
    "seed": "train.seed",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "learning_rate": "train.optimizer.learning_rate",
    "weight_decay": "train.optimizer.weight_decay",
    "lr_schedule": "train.lr_schedule",
    "warmup_fraction": "train.warmup_fraction",
    "warmup_steps": "train.warmup_steps",
    "clip_grad_norm": "train.clip_grad_norm",
    "precision": "train.precision",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "",
    "log_every_steps": "train.log_every_steps",
    "checkpoint_every_steps": "train.checkpoint_every_steps",
    "keep_checkpoints": "train.keep_checkpoints",
    "sequence_length": "data.sequence_length",
    "min_pixels": "model.min_pixels",
    "max_pixels": "model.max_pixels",
}
PLACEHOLDERS = (*FOLDERS, *SETTINGS)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
# Programs that start a process for each GPU themselves.
SELF_LAUNCHING = (
    "llamafactory-cli", "swift", "automodel", "axolotl", "torchrun", "accelerate", "deepspeed",
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",  # after python -m
)  # fmt: skip
WITH_ROLES = ("tensorflow", "roles")
HF_RESULTS = ("hf-model", "hf-adapter")
TORCHRUN_GRACE_S = 30  # torchrun kills its workers this long after SIGTERM


class RolesConfig(Section):
    """Replicas in addition to the chief and the workers."""

    ps: int = Field(0, ge=0, description="Parameter servers: worker pool 2.")
    evaluator: int = Field(0, ge=0, description="Evaluators: worker pool 3.")
    ps_machine_type: str = Field(
        "",
        description="Machine of the parameter servers, without GPUs; empty takes that of the nodes. Not used on this "
        "machine.",
    )


class ExternalTrainerConfig(Section):
    """A training program of the user's, and its contract with vlmpipe."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=63, description="Name in the model card, reports and diagnosis."
    )
    kind: Literal["command", "package"] = Field(
        "command",
        description="command runs a program of the image. package installs Python packages into an image of Vertex AI "
        "and runs python_module, with command as its arguments.",
    )
    image_uri: str = Field(
        "", description="Image with the program and vlmpipe; empty takes cluster.image_uri. Not used on this machine."
    )
    package_uris: tuple[Word, ...] = Field(
        (),
        description="Python packages to install, one of which brings vlmpipe: folders with a project, which are "
        "built, wheels or source distributions. Local ones are uploaded below gcp.pipeline_root. For kind package.",
    )
    executor_image_uri: str = Field("", description="Image in which the packages are installed. For kind package.")
    python_module: str = Field(
        "", pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?$", description="Module to run. For kind package."
    )
    python: str = Field(
        "",
        description="Python of the program's own environment, whose folder comes first on PATH; empty takes the one "
        "that runs vlmpipe. For local runs.",
    )
    command: tuple[Word, ...] = Field(
        (),
        description="Program and arguments, such as [python, train.py, --data, '{data}', --output, '{output}']. Names "
        "in braces are folders (data, model, output, checkpoints, resume) or settings of this file, such as {seed}.",
    )
    resume_args: tuple[Word, ...] = Field(
        (),
        description="Arguments added when there is a verified checkpoint, such as [--resume, '{resume}']; empty: the "
        "program starts from the beginning after an interruption.",
    )
    resume_as_model: bool = Field(
        False,
        description="Use the checkpoint as {model} when resuming, for programs that restore the optimizer but not all "
        "weights of a vision-language model.",
    )
    launch: Launch = Field(
        "torchrun",
        description="How the command is started. torchrun: once for each process of a node. self: once on a node, and "
        "the program starts its processes itself from NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT. "
        "each-node: once on a node with the platform's variables only. tensorflow sets TF_CONFIG; roles sets RANK and "
        "WORLD_SIZE, chief first, then workers, parameter servers and evaluators; horovod runs horovodrun.",
    )
    roles: RolesConfig = Field(
        default_factory=RolesConfig, description="Parameter servers and evaluators. For launch tensorflow and roles."
    )
    data_format: DataFormat = Field("messages", description="Form of the samples in {data}; none writes no samples.")
    result: Result = Field(
        "hf-model",
        description="Content of {output} at the end: a Hugging Face model, a PEFT adapter, a TensorFlow SavedModel, "
        "or opaque files.",
    )
    total_steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps after which training is done; 0 takes train.max_steps, or the number that the "
        "program reports.",
    )
    stop_grace_s: Positive = Field(
        TORCHRUN_GRACE_S,
        le=600,
        description="Seconds from SIGTERM to SIGKILL when a run is stopped; torchrun itself kills after 30.",
    )
    evaluate_command: tuple[Word, ...] = Field(
        (),
        description="Evaluation command in place of the built-in evaluation: it reads {model} and {data} and writes "
        "evaluate.json into {output}; empty for none. Needed for results that are no Hugging Face model.",
    )

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> ExternalTrainerConfig:
        for field in ("command", "resume_args", "evaluate_command"):
            for name in _PLACEHOLDER.findall(" ".join(getattr(self, field))):
                if name not in PLACEHOLDERS:
                    close = difflib.get_close_matches(name, PLACEHOLDERS, 1)
                    hint = f"did you mean {{{close[0]}}}?" if close else f"known are {', '.join(PLACEHOLDERS)}"
                    raise ValueError(f"{field} has the unknown placeholder {{{name}}}: {hint}")
        if "{resume}" in " ".join(self.command):
            raise ValueError("command has {resume}, which is empty at the start: put it into resume_args")
        return self

    @model_validator(mode="after")
    def _kind_is_complete(self) -> ExternalTrainerConfig:
        of_package = ("package_uris", "executor_image_uri", "python_module")
        if self.kind == "command":
            if not self.command:
                raise ValueError("command is missing: kind command needs the program and its arguments")
            if settings := [name for name in of_package if getattr(self, name)]:
                raise ValueError(f"{settings[0]} does not apply to kind command: use kind package, or leave it out")
        elif missing := [name for name in of_package if not getattr(self, name)]:
            raise ValueError(f"{missing[0]} is missing: kind package needs {', '.join(of_package)}")
        elif self.image_uri:
            raise ValueError("image_uri does not apply to kind package: executor_image_uri is its image")
        return self

    @model_validator(mode="after")
    def _launch_fits(self) -> ExternalTrainerConfig:
        if self.launch == "torchrun" and (program := self.self_launching):
            raise ValueError(
                f"launch torchrun would start {program} in every process, and {program} starts processes itself: use "
                "launch self, or leave it and its options out of command"
            )
        if self.launch not in WITH_ROLES and (self.roles.ps or self.roles.evaluator):
            raise ValueError(
                f"roles have no meaning for launch {self.launch}: use one of {', '.join(WITH_ROLES)}, or leave them out"
            )
        if self.roles.ps_machine_type and not self.roles.ps:
            raise ValueError("roles.ps_machine_type does not apply without parameter servers: set roles.ps")
        if self.launch == "torchrun" and self.stop_grace_s > TORCHRUN_GRACE_S:
            raise ValueError(
                f"stop_grace_s {self.stop_grace_s} is more than the {TORCHRUN_GRACE_S} s after which torchrun kills "
                f"its workers: use launch self, or at most {TORCHRUN_GRACE_S}"
            )
        return self

    @model_validator(mode="after")
    def _result_is_evaluated(self) -> ExternalTrainerConfig:
        if self.result not in HF_RESULTS and not self.evaluate_command:
            raise ValueError(
                f"evaluate_command is missing: our evaluation loads Hugging Face models only, and result is "
                f"{self.result}"
            )
        if self.resume_as_model and not self.resume_args:
            raise ValueError("resume_as_model does not apply without resume_args: the program never resumes")
        return self

    @property
    def self_launching(self) -> str:
        """The program of the command that starts processes itself; empty for others."""
        words = [os.path.basename(word) for word in self.command[:3]]
        return next((word for word in words if word in SELF_LAUNCHING), "")

    @property
    def uses_allreduce(self) -> bool:
        """Return whether gradients may be summed by NCCL's all-reduce."""
        return self.launch not in WITH_ROLES

    @property
    def used_settings(self) -> frozenset[str]:
        """Fields of the run file that placeholders read."""
        text = " ".join((*self.command, *self.resume_args, *self.evaluate_command))
        names = {name for name in _PLACEHOLDER.findall(text) if name in SETTINGS}
        combined = (
            {"train.global_batch_size", "train.micro_batch_size"} if "gradient_accumulation_steps" in names else set()
        )
        return frozenset({SETTINGS[name] for name in names if SETTINGS[name]} | combined)


def python_of_image(image_uri: str) -> tuple[int, int] | None:
    """Python of an image that is named by it, as Google's are: (3, 10) for pytorch-gpu.2-4.py310; else None."""
    match = re.search(r"[.-]py(3)(\d{1,2})(?=[.:@-]|$)", image_uri)
    return (int(match[1]), int(match[2])) if match else None


def fill_in(words: tuple[str, ...], values: dict[str, str]) -> list[str]:
    """The words with each placeholder replaced. Other braces stay as they are."""
    return [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in words]
