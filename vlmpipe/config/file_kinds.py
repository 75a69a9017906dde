"""Files that are given where another one is expected, by their keys: what each is, and which command takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_KEYS = 2  # that a file has of its kind's
HTML = ("<!doctype html", "<html")


@dataclass(frozen=True)
class FileKind:
    """A kind of file. `fix` has the path as {path}."""

    name: str
    keys: frozenset[str]
    fix: str

    def fix_for(self, path: object) -> str:
        return self.fix.format(path=path)


RUN_FILE = FileKind("a run file", frozenset({"model", "data", "train"}), "vlmpipe check {path}")
PIPELINE = FileKind(
    "a compiled pipeline",
    frozenset({"pipelineSpec", "deploymentSpec", "pipelineInfo"}),
    "give the run file that it was compiled from: it is the default of the parameter run_file in this file",
)
JOB_SPEC = FileKind(
    "a job spec",
    frozenset({
        "worker_pool_specs", "workerPoolSpecs", "job_spec", "jobSpec", "display_name", "displayName", "scheduling",
        "service_account", "serviceAccount", "base_output_directory", "baseOutputDirectory",
    }),
    "vlmpipe check --job-spec {path}, and vlmpipe submit --job-spec {path} to start it",
)  # fmt: skip
DEEPSPEED = FileKind(
    "a DeepSpeed configuration",
    frozenset({
        "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "gradient_clipping", "bf16", "fp16",
    }),
    "give a run file with train.strategy zero2 or zero3; what it does not decide itself goes into train.deepspeed",
)  # fmt: skip
MODEL_CONFIG = FileKind(
    "a model's config.json",
    frozenset({"architectures", "model_type", "transformers_version"}),
    "give a run file that names the model's folder or hub id in its section model",
)
RESULT = FileKind(
    "a result of a run",
    frozenset({"exact_match", "questions", "controls", "accepted", "reason", "checks", "steps", "final_loss"}),
    "vlmpipe status RUN shows it; give the run file",
)
MANIFEST = FileKind(
    "a Kubernetes object",
    frozenset({"apiVersion", "kind"}),
    "give a run file; vlmpipe compile makes what Kubeflow takes",
)
NOTEBOOK = FileKind(
    "a notebook",
    frozenset({"cells", "nbformat", "nbformat_minor"}),
    'give a run file; from a notebook, vlmpipe.run("RUN_FILE") starts it',
)
OTHER_TRAINER = FileKind(
    "a file of settings of another training program",
    frozenset({
        "model_name_or_path", "finetuning_type", "do_train", "output_dir", "per_device_train_batch_size",
        "num_train_epochs", "base_model", "sequence_len", "lora_target", "dataset_prepared_path", "datasets", "adapter",
    }),
    "give a run file whose train.trainer.command starts that program with {path}; see vlmpipe docs "
    "bring-your-own-trainer",
)  # fmt: skip
ACCELERATE = FileKind(
    "a configuration of accelerate",
    frozenset({"compute_environment", "distributed_type", "num_machines", "fsdp_config", "deepspeed_config"}),
    "give a run file: its sections train and cluster decide this",
)
KINDS = (RUN_FILE, PIPELINE, JOB_SPEC, DEEPSPEED, MODEL_CONFIG, RESULT, MANIFEST, NOTEBOOK, OTHER_TRAINER, ACCELERATE)


def kind_of_content(content: Mapping[str, object]) -> FileKind | None:
    """The kind whose keys a file's content has, if there is one; of several that with the most."""
    likeliest = max(KINDS, key=lambda kind: len(kind.keys & content.keys()))
    if "workerPoolSpecs" in content or "worker_pool_specs" in content:
        return JOB_SPEC
    return likeliest if len(likeliest.keys & content.keys()) >= MIN_KEYS else None


def is_html(text: str) -> bool:
    """Return whether a text is a page, such as a report."""
    return text.lstrip().lower().startswith(HTML)
