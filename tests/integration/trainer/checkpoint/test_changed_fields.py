"""Every field of `train` is changed between two real starts, under every strategy: refused or trained with.

`make test-whole` runs it. The default suite decides the same by what COMMIT records
(tests/unit/trainer/checkpoint/test_resume_rules.py), and trains with what an update depends on.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.support.trainer.runs import ends_of_ranks, losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import TINY, merged, strategy_changes
from vlmpipe.trainer.checkpoint.resume_rules import SECTIONS, leaves, rules_by_field
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.strategies import TENSOR_PARALLEL
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.storage import open_storage

STRATEGIES = get_args(TrainConfig.model_fields["strategy"].annotation)
# With the precision that the runs begin in: some settings are of bf16 alone.
BEGINNINGS = [*((name, "fp32") for name in STRATEGIES), *((f"zero{stage}", "bf16") for stage in (1, 2, 3))]
PROCESSES, STOP_STEP = 4, 2
BF16 = {"train.precision": "bf16"}
# Another value of each field, with what it needs beside it. Where a strategy has no such value, its case is left out.
CASES: dict[str, dict[str, Any]] = {
    "strategy": {"train.strategy": "fsdp"},
    "objective": {"train.objective": "simpo"},
    "offload": {"train.offload": "optimizer"},
    "tensor_parallel": {"train.tensor_parallel": 4},
    "sequence_parallel": {"train.sequence_parallel": True},
    "pipeline_parallel": {"train.strategy": "tp", "train.pipeline_parallel": 1, "train.tensor_parallel": 2},
    "context_parallel": {"train.context_parallel": 2},
    "epochs": {"train.epochs": 4},
    "max_steps": {"train.max_steps": 4},
    "global_batch_size": {"train.global_batch_size": 16},
    "micro_batch_size": {"train.micro_batch_size": 1},
    "optimizer.name": {"train.optimizer.name": "adamw_8bit"},
    "optimizer.learning_rate": {"train.optimizer.learning_rate": 1e-2},
    "optimizer.projector_learning_rate": {"train.optimizer.projector_learning_rate": 1e-2},
    "optimizer.tower_learning_rate": {"train.optimizer.tower_learning_rate": 1e-2},
    "optimizer.batch_scaling": {"train.optimizer.batch_scaling": "sqrt", "train.optimizer.reference_batch_size": 4},
    "optimizer.weight_decay": {"train.optimizer.weight_decay": 1.0},
    "optimizer.betas": {"train.optimizer.betas": [0.5, 0.5]},
    "optimizer.eps": {"train.optimizer.eps": 1e-3},
    "lr_schedule": {"train.lr_schedule": "cosine"},
    "warmup_fraction": {"train.warmup_fraction": 0.9},
    "warmup_steps": {"train.warmup_steps": 5, "train.warmup_fraction": None},
    "decay_fraction": {"train.decay_fraction": 0.5, "train.lr_schedule": "wsd"},
    "final_rate_fraction": {"train.final_rate_fraction": 0.5, "train.lr_schedule": "linear"},
    "ema_decay": {"train.ema_decay": 0.5},
    "clip_grad_norm": {"train.clip_grad_norm": 0.1},
    "precision": BF16,
    "shard_frozen_weights": {"train.shard_frozen_weights": True},
    "gradient_accumulation_dtype": BF16 | {"train.gradient_accumulation_dtype": "bf16"},
    "reduce_dtype": BF16 | {"train.reduce_dtype": "bf16"},
    "reshard_after_forward": {"train.reshard_after_forward": "always"},
    "prefetch_layers": {"train.prefetch_layers": 2},
    "activation_checkpointing": {"train.activation_checkpointing": "full"},
    "tower_activation_checkpointing": {"train.tower_activation_checkpointing": True},
    "activation_offloading": {"train.activation_checkpointing": "full", "train.activation_offloading": True},
    "loss_chunk_tokens": {"train.loss_chunk_tokens": 0},
    "compile": {"train.compile": "on", "train.compile_backend": "aot_eager"},
    "gradient_compression": {"train.precision": "bf16-autocast", "train.gradient_compression": "bf16"},
    "deepspeed": {"train.deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}},
    "seed": {"train.seed": 5},
    "log_every_steps": {"train.log_every_steps": 2},
    "validate_every_steps": {
        "train.validate_every_steps": 2,
        "train.validation_sequences": 2,
        "train.best_metric": "validation_exact_match",
    },
    "checkpoint_every_steps": {"train.checkpoint_every_steps": 1, "train.keep_checkpoints": 1},
    "deterministic": {"train.deterministic": False},
    "measure_communication": {"train.measure_communication": True},
    "profile.steps": {"train.profile": {"start_step": 3, "steps": 1}},
    "stall_factor": {"train.stall_factor": 50.0, "train.stall_floor_s": 400.0},
}
# Fields that a case above changes beside its own, and those that have none.
WITH_OTHERS = {
    "optimizer.reference_batch_size", "compile_backend", "validation_sequences", "best_metric",
    "keep_checkpoints", "profile.start_step", "stall_floor_s",
}  # fmt: skip
NOT_HERE = {
    "virtual_stages": "the tiny model has too few layers",
    "float8": "needs a GPU",
    "router_loss": "needs a model with experts",
    "early_stopping.patience": "ends training: tests/integration/trainer/evaluation/test_early_stopping.py",
    "early_stopping.min_improvement": "is one of early_stopping.patience",
    "dpo_beta": "needs data in pairs",
    "simpo_beta": "needs data in pairs",
    "simpo_gamma": "needs data in pairs",
    "resume": "says what is resumed: tests/unit/trainer/checkpoint/test_manager.py",
    "profile.ranks": "is one of profile.steps",
    **dict.fromkeys(
        ("wandb.project", "wandb.entity", "wandb.api_key_secret", "mlflow.tracking_uri", "mlflow.experiment"),
        "needs a service",
    ),
}


def test_every_field_has_a_case_or_a_reason_for_none() -> None:
    ours = {path for path, _, _ in leaves(SECTIONS["train"], "train") if not path.startswith("train.trainer.")}
    assert {f"train.{name}" for name in (*CASES, *WITH_OTHERS, *NOT_HERE)} == ours


def job_settings(strategy: str, precision: str, changes: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"model.freeze": [], "train.precision": precision}
    if strategy in TENSOR_PARALLEL:  # heads for twice as many ranks
        own["model.language_model.config.num_key_value_heads"] = 4
    return strategy_changes(strategy) | own | changes


def is_valid(settings: dict[str, Any]) -> bool:
    """Whether the strategy has such a value, and these processes can share the work by it."""
    try:
        train = TrainConfig.model_validate(merged(TINY, settings)["train"])
    except ValidationError:
        return False
    return PROCESSES % (train.tensor_parallel * train.pipeline_parallel * train.context_parallel) == 0


def copied(root: Path, base: JobConfig, name: str, settings: dict[str, Any]) -> JobConfig:
    """A run with the checkpoints of `base` and these settings."""
    run_id = f"{base.run.run_id}-{name}"
    shutil.copytree(f"{base.run.run_uri}/checkpoints", root / "runs" / run_id / "checkpoints")
    return make_run(root, run_id, settings, features="off")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "precision"), BEGINNINGS)
def test_each_field_is_refused_by_name_or_trained_with(strategy: str, precision: str, tmp_path: Path) -> None:
    stopped = job_settings(strategy, precision, {"train.max_steps": STOP_STEP})
    base = make_run(tmp_path, strategy, stopped, features="off")
    train_runs([base], processes=PROCESSES)
    rules, taken, refused = rules_by_field(), list[JobConfig](), list[tuple[list[str], JobConfig]]()
    for name, changes in CASES.items():
        settings = job_settings(strategy, precision, changes)
        # Other strategies and numbers of ranks: see test_elastic_resume.py.
        if not is_valid(settings) or settings["train.strategy"] != strategy:
            continue
        job = copied(tmp_path, base, name.replace(".", "-"), settings)
        changed = [field for field in settings if field in rules and settings[field] != stopped.get(field)]
        if reasons := [field for field in changed if rules[field].outcome == "refused"]:
            refused.append((reasons, job))
        else:
            taken.append(job)
    assert len(taken) > 20 and len(refused) >= 2
    train_runs(taken, processes=PROCESSES, timeout_s=600)
    for job in taken:
        assert summary(job)["resumed_from_step"] == STOP_STEP < summary(job)["steps"], job.run.run_id
        assert all(map(math.isfinite, losses(job)))
    for reasons, job in refused:
        arguments = ["--configs", f"{job.run.run_uri}/run.json"]
        codes, said = ends_of_ranks("tests.support.drivers.train_many", arguments, processes=PROCESSES)
        assert set(codes) == {64}, (reasons, codes)
        assert any(f"{field} changed from" in "".join(said) for field in reasons), reasons
        assert open_storage(job.run.run_uri).list("checkpoints"), "nothing is deleted"
