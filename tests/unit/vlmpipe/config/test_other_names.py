"""Words of guides in a run file are answered with the field that does it, or with the reason that there is none."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.other_names import GONE, GONE_VALUES, VALUES, WORDS
from vlmpipe.config.run_config import RunConfig, RunFileError, load_run_file
from vlmpipe.config.validation_errors import fields_of
from vlmpipe.pipelines.checks.deepspeed_values import with_values

# As in the guides: the section they would be looked for in, and what must be in the answer.
TYPED = {
    "cluster.spot": "cluster.scheduling_strategy: spot",
    "cluster.use_spot": "cluster.scheduling_strategy: spot",
    "cluster.preemptible": "cluster.scheduling_strategy: spot",
    "cluster.persistent_disk_size_gb": "output.root_uri",
    "cluster.parameter_servers": "train.trainer.roles",
    "cluster.max_restarts": "cluster.restart_job_on_worker_restart",
    "train.sharding_strategy": "train.strategy: fsdp",
    "train.HYBRID_SHARD": "train.strategy: hsdp",
    "train.full_shard": "train.strategy: fsdp",
    "train.shard_grad_op": "train.strategy: zero2",
    "train.horovod": "recipes/horovod",
    "train.data_parallel": "leave it out",
    "train.scheduler": "train.lr_schedule",
    "train.fp16": "train.precision: fp16",
    "train.bf16": "train.precision: bf16",
    "train.num_workers": "data.loader_threads",
    "data.num-workers": "data.loader_threads",
    "train.find_unused_parameters": "leave it out",
    "train.bucket_cap_mb": "leave it out",
    "train.min_num_params": "leave it out",
    "train.freeze_gc": "leave it out",
    "cluster.local_port": "leave it out",
    "checkpoint.mirror_lag_warning_s": "leave it out",
}
# Names in guides to training on several GPUs that a reader of them types here.
OF_GUIDES = (
    "spot", "use_spot", "preemptible", "persistent_disk_size_gb", "parameter_servers", "max_restarts", "hybrid_shard",
    "full_shard", "shard_grad_op", "horovod", "deepspeed", "sharding_strategy", "data_parallel", "scheduler", "fp16",
    "bf16", "num_workers", "find_unused_parameters", "bucket_cap_mb", "min_num_params", "warmup_steps", "true",
)  # fmt: skip
DECISION = ROOT / "docs/decisions/0148-use-fewer-features.md"


def problem(override: str) -> str:
    with pytest.raises(RunFileError) as caught:
        load_run_file(ROOT / "configs/digits.yaml", [override])
    (found,) = caught.value.problems
    return found.text


@pytest.mark.parametrize("key", TYPED)
def test_a_word_of_guides_is_answered(key: str) -> None:
    assert TYPED[key] in problem(f"{key}=1").removeprefix("unknown key: ")


def test_each_word_is_tried() -> None:
    assert {key.rpartition(".")[2].lower().replace("-", "_") for key in TYPED} == set(WORDS)


VALUES_TYPED = [
    ("train.strategy=HYBRID_SHARD", "; it is hsdp here"),
    ("train.strategy=FULL_SHARD", "; it is fsdp, or zero3 here"),
    ("train.strategy=SHARD_GRAD_OP", "; it is zero2 here"),
    ("train.strategy=horovod", "recipes/horovod"),
    ("train.strategy=deepspeed", "zero1, zero2 or zero3"),
    ("train.strategy=parameter_server", "recipes/parameter-server"),
    ("features.cache=true", "; it is on here"),
    ("features.cache=false", "; it is off here"),
]


@pytest.mark.parametrize(("override", "said"), VALUES_TYPED)
def test_a_guides_value_is_answered_with_ours(override: str, said: str) -> None:
    assert said in problem(override)


@pytest.mark.parametrize("override", [f"{path}=true" for path in GONE] + ["=".join(each) for each in GONE_VALUES])
def test_a_field_that_is_gone_is_answered_with_what_to_use_instead(override: str) -> None:
    answer = problem(override).partition("it is gone, use ")[2]
    rows = [line.split("|") for line in DECISION.read_text().splitlines() if line.startswith("|")]
    (instead,) = [row[2] for row in rows if f"`{override.partition('=')[0]}" in row[1]]
    assert answer
    assert answer.split()[0].strip(",:") in instead


def test_every_name_of_guides_is_a_field_or_is_tried_above() -> None:
    tried = {key.rpartition(".")[2].lower().replace("-", "_") for key in TYPED}
    tried |= {override.rpartition("=")[2].lower() for override, _ in VALUES_TYPED}
    fields = {path.rpartition(".")[2] for path, _, _ in fields_of(RunConfig)}
    assert not set(OF_GUIDES) - tried - fields
    assert "warmup_steps" in fields


def test_a_path_in_place_of_deepspeeds_settings_is_an_answer() -> None:
    assert "expected a section with keys" in problem("train.deepspeed=ds_config.json")
    with pytest.raises(RunFileError) as caught:
        load_run_file(ROOT / "configs/digits.yaml", ["train.deepspeed=ds_config.json"])
    assert with_values(caught.value, ROOT / "configs/digits.yaml", ["train.deepspeed=ds_config.json"]) is caught.value


def test_the_key_of_wandb_is_answered_with_the_secret_that_holds_it() -> None:
    assert problem("train.wandb.api_key=x") == "unknown key, did you mean train.wandb.api_key_secret?"


def test_answers_name_fields_that_exist() -> None:
    known = {path for path, _, _ in fields_of(RunConfig)}
    assert not known & set(GONE)
    for text in [*WORDS.values(), *VALUES.values(), *GONE.values(), *GONE_VALUES.values()]:
        for path in re.findall(r"\b(?:train|cluster|data|model|output|features)\.[a-z_.]+[a-z_]", text):
            parts = path.split(".")
            assert any(".".join(parts[:length]) in known for length in range(2, len(parts) + 1)), path
    assert {path for path, _ in VALUES} <= known
