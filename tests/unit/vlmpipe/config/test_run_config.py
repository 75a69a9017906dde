"""The run file: what it accepts, and what it says about what it does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.run_files import SMALL, problems_of, small
from vlmpipe.config.run_config import load_new_run, load_run_file, parse_run_config, warnings
from vlmpipe.config.run_fields import BUILTIN_SOURCES
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.platforms.table import platform_of
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.runs.folders.marker import DEFAULT_ROOT
from vlmpipe.trainer.config.job import JobConfig, RunPaths

NODE_COPY = {"zero_optimization": {"zero_hpz_partition_size": 2}}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_run_files_are_valid_and_complete_for_vertex(path: Path) -> None:
    config = load_shipped(path)
    require_vertex(config)
    assert config.name == path.stem
    assert warnings(config) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_run_file_lets_evaluate_compare_the_exports_loss_with_trainings(path: Path) -> None:
    """Of preference pairs training takes no validation loss."""
    for stage, config in load_run_file(path).stage_runs().items():
        assert bool(config.train.validate_every_steps) == (config.train.objective == "sft"), stage


def test_the_spot_run_file_has_reducers_for_the_bandwidth_of_its_nodes() -> None:
    cluster = load_run_file(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml").cluster
    node_gbps, reducer_gbps = 100, 32
    assert cluster.reduction_server
    assert cluster.reduction_server.replica_count == -(-cluster.replica_count * node_gbps // reducer_gbps)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.learning_rat", "train.optimizer.learning_rate"),
        ("train.epoch", "train.epochs"),
        ("tran", "train"),
        ("learning_rate", "train.optimizer.learning_rate"),
        ("train.lr", "train.optimizer.learning_rate"),
        ("cluster.reduction_server.replicas_count", "cluster.reduction_server.replica_count"),
        ("cluster.accelerator-type", "cluster.accelerator_type"),
        ("data.machine_type", "cluster.machine_type"),
    ],
)
def test_an_unknown_key_is_answered_with_the_closest_known_one(key: str, meant: str) -> None:
    problems = problems_of(**{key: 1})
    assert f"did you mean {meant}?" in problems[key]


def test_an_unknown_key_far_from_all_others_is_answered_with_the_section_keys() -> None:
    text = problems_of(features__zzz=1)["features.zzz"]
    assert "known here: cache, shard_images, batch_images" in text


def test_all_problems_are_listed_at_once() -> None:
    problems = problems_of(train__epochs=-1, train__strategy="dpp", data__sequence_length="x", gate__max_loss=-1)
    assert set(problems) == {"train.epochs", "train.strategy", "data.sequence_length", "gate.max_loss"}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("train.epochs", -1, "found -1, expected a number of at least 0"),
        ("train.epochs", 0, "found 0, which trains nothing and is for variants of a sweep; expected at least 1"),
        ("train.epochs", 1.5, "found 1.5, expected a whole number"),
        ("train.strategy", "ddpp", 'found "ddpp", expected one of ddp, '),
        ("train.strategy", "ddpp", "; did you mean ddp?"),
        ("data.sequence_length", "many", 'found "many", expected a whole number'),
        ("data.pack", "maybe", 'found "maybe", expected true or false'),
        ("cluster.processes_per_replica", "all", 'found "all", expected auto or a whole number'),
        ("cluster.reduction_server", 3, "found 3, expected a section with keys of its own"),
        ("cluster.timeout", "2h", 'found "2h", expected a text of the form ^[0-9]{1,9}s$'),
        ("gate.per_slice", {"digit": 2}, None),
        ("gate.min_scores", {"bleu": 0.5}, None),
        ("gate.min_scores", {"anls": 80}, None),
        ("data.source", "builtin:digit", "did you mean builtin:digits?"),
        ("schedule", {"cron": "TZ=UTC 0 3 * * 1"}, None),
        ("schedule", {"cron": "0 3 * * 1", "timezone": "Mars"}, None),
        ("model.tower.weights", "openai/x", None),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(field: str, value: Any, expected: str | None) -> None:
    (found, text), *others = problems_of(**{field: value}).items()
    assert others == []
    assert found.startswith(field.rpartition(".")[0])
    assert expected is None or expected in text


def test_a_missing_field_is_named_with_its_purpose() -> None:
    data = copy.deepcopy(SMALL)
    del data["train"]["optimizer"]
    with pytest.raises(RunFileError, match=r"train\.optimizer: missing, and there is no default\. AdamW settings"):
        parse_run_config(data, "x.yaml")


def test_a_missing_field_of_a_section_in_a_list_is_named() -> None:
    sources = [{"name": "a", "uri": "a.json"}, {"name": "b", "image_folder": "b"}]
    found = problems_of(data={"sources": sources, "sequence_length": 256})
    assert found == {"data.sources.1": "has no uri: expected one of uri and replay: self"}


POPE = {"name": "pope", "format": "pope", "uri": "pope.json", "images": "images"}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"features__cache": "on", "model__freeze": []}, "features.cache"),
        ({"output__root_uri": "gs://b/runs", "checkpoint__mirror_uri": "gs://b/copy"}, "checkpoint.mirror_uri"),
        ({"gcp__pipeline_root": "gs://b", "checkpoint__mirror_uri": "gs://b/copy"}, "checkpoint.mirror_uri"),
        ({"output__root_uri": "all", "checkpoint__mirror_uri": "all/../all/copy"}, "checkpoint.mirror_uri"),
        ({"gate__min_scores": {"cider_d": 1}, "evaluate__cider_d": "off"}, "gate.min_scores.cider_d"),
        ({"gate__benchmarks": {"pope": {"f1": 0.5}}}, "gate.benchmarks.pope"),
        ({"gate__benchmarks": {"pope": {"anls": 0.5}}, "evaluate__benchmarks": [POPE]}, "gate.benchmarks.pope.anls"),
        ({"gate__benchmarks": {"pope": {"f1": 50}}, "evaluate__benchmarks": [POPE]}, "gate.benchmarks.pope.f1"),
        ({"evaluate__benchmarks": [POPE, POPE]}, "evaluate.benchmarks"),
        ({"evaluate__benchmarks": [{**POPE, "images": ""}]}, "evaluate.benchmarks.0"),
        ({"train__global_batch_size": 6, "cluster__replica_count": 4}, "train.global_batch_size"),
        ({"gate__min_scores": {"preference_accuracy": 0.5}}, "gate.min_scores.preference_accuracy"),
        ({"train__objective": "dpo", "train__strategy": "tp", "train__tensor_parallel": 2}, "train"),
        ({"train__objective": "dpo", "train__context_parallel": 2, "cluster__replica_count": 2}, "train"),
        ({"train__objective": "dpo", "train__validate_every_steps": 5}, "train"),
        ({"data__slices": ["camera"]}, "data.slices"),  # of a built-in set
        ({"train__objective": "dpo", "train__early_stopping": {}}, "train"),
        ({"train__early_stopping": {}, "train__validate_every_steps": 0}, "train"),
        ({"train__early_stopping": {"patience": 0}}, "train.early_stopping.patience"),
        ({"train__best_metric": "validation_exact_match", "train__loss_chunk_tokens": 0}, "train"),
        ({"checkpoint__export": "best", "train__validate_every_steps": 0}, "checkpoint.export"),
        ({"checkpoint__export": "best", "train__objective": "dpo"}, "checkpoint.export"),
        ({"train__objective": "simpo", "train__strategy": "tp", "train__tensor_parallel": 2}, "train"),
        ({"train__objective": "simpo", "train__dpo_beta": 0.5}, "train"),
        ({"train__objective": "dpo", "train__simpo_gamma": 0.5}, "train"),
        ({"train__simpo_beta": 3.0}, "train"),
        ({"train__micro_batch_size": 3}, "train"),
        ({"train__profile": {"ranks": [0, 1]}}, "train.profile.ranks"),
        ({"train__profile": {}, "train__max_steps": 5}, "train.profile"),
        ({"train__activation_offloading": True}, "train"),
        (
            {
                "train__activation_offloading": True,
                "train__activation_checkpointing": "full",
                "train__strategy": "pp",
                "train__pipeline_parallel": 2,
            },
            "train",
        ),
        ({"train__compile": "on", "train__strategy": "zero3"}, "train"),
        ({"train__float8": "rowwise", "train__strategy": "zero2"}, "train"),
        ({"train__gradient_compression": "bf16", "train__strategy": "fsdp"}, "train"),
        ({"train__deepspeed": NODE_COPY, "train__strategy": "hsdp"}, "train.deepspeed"),
        (
            {
                "train__deepspeed": NODE_COPY,
                "train__strategy": "zero3",
                "train__global_batch_size": 64,
                "cluster__replica_count": 2,
                "cluster__processes_per_replica": 4,
            },
            "train.deepspeed",
        ),
        ({"train__strategy": "tp+pp+dp", "train__tensor_parallel": 2}, "train"),
        ({"train__virtual_stages": 2}, "train"),
        (
            {
                "train__strategy": "tp+pp+dp",
                "train__tensor_parallel": 2,
                "train__pipeline_parallel": 2,
                "train__global_batch_size": 64,
                "cluster__replica_count": 3,
            },
            "train.tensor_parallel",
        ),
        ({"train__sequence_parallel": True}, "train"),
        ({"train__context_parallel": 2, "train__strategy": "tp", "train__tensor_parallel": 2}, "train"),
        ({"train__context_parallel": 2}, "train.context_parallel"),  # of one rank
        (  # which would lie on parts of two nodes
            {"train__context_parallel": 2, "cluster__replica_count": 2, "cluster__processes_per_replica": 3},
            "train.context_parallel",
        ),
        (
            {"train__context_parallel": 2, "cluster__replica_count": 2, "data__sequence_length": 255},
            "train.context_parallel",
        ),
        (
            {
                "train__strategy": "tp",
                "train__tensor_parallel": 2,
                "train__sequence_parallel": True,
                "data__sequence_length": 255,
            },
            "train.sequence_parallel",
        ),
        ({"train__lr_schedule": "wsd", "train__warmup_fraction": 0.5, "train__decay_fraction": 0.6}, "train"),
        ({"cluster__reduction_server": {"replica_count": 2}}, "cluster.reduction_server"),
        ({"cluster__accelerator_type": "NVIDIA_L4"}, "cluster"),
        ({"cluster__scheduling_strategy": "flex_start"}, "cluster.scheduling_strategy"),
        ({"model__lora": {"quantize_base": "nf4"}, "train__strategy": "zero2"}, "model.lora.quantize_base"),
        ({"model__lora": {"quantize_base": "nf4"}, "train__compile": "on"}, "train.compile"),
        ({"model__lora": {"quantize_base": "nf4", "use_dora": True}}, "model"),
        ({"model__lora": {"parts": ["tower"]}}, "model"),
        ({"model__lora": {"parts": ["tower"]}, "model__freeze": [], "features__cache": "on"}, "features.cache"),
        ({"model__lora": {"use_dora": True}, "train__strategy": "zero3"}, "model.lora.use_dora"),
        ({"model__lora": {"use_dora": True}, "train__float8": "rowwise", "train__strategy": "fsdp"}, "train.float8"),
        (
            {
                "model__lora": {"parts": ["projector"]},
                "model__freeze": ["tower"],
                "train__strategy": "tp",
                "train__tensor_parallel": 2,
            },
            "model.lora.parts",
        ),
        ({"model__lora": {"export": "adapter"}}, "model.lora.export"),
        ({"model__lora": {"pretrained": "some/adapter"}}, "model.lora.pretrained"),
        ({"model__lora": {"pretrained": "some/adapter", "quantize_base": "nf4"}}, "model.lora.pretrained"),
        ({"model__lora": {"quantize_base": "nf4"}, "train__float8": "tensorwise"}, "train.float8"),
        ({"train__optimizer": {"learning_rate": 1e-3, "name": "adamw_8bit"}, "train__strategy": "zero2"}, "train"),
        ({"gcp__network": "n", "gcp__psc_interface_config": {"network_attachment": "a"}}, "gcp"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: dict[str, Any], field: str) -> None:
    assert field in problems_of(**overrides)


GPU_NODES = {
    "cluster__replica_count": 2,
    "cluster__accelerator_type": "NVIDIA_TESLA_A100",
    "cluster__accelerator_count": 2,
    "cluster__reduction_server": {"replica_count": 2},
}


TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"  # of the form of one


@pytest.mark.parametrize(("strategy", "accepted"), [("ddp", True), ("zero2", True), ("fsdp", False)])
def test_a_reduction_server_needs_a_strategy_that_all_reduces(strategy: str, accepted: bool) -> None:
    if accepted:
        assert small(train__strategy=strategy, **GPU_NODES).cluster.reduction_server
    else:
        assert "all-reduce" in problems_of(train__strategy=strategy, **GPU_NODES)["cluster.reduction_server"]


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_in_the_environment_is_refused_and_not_repeated(name: str) -> None:
    problems = problems_of(cluster__env={name: "s3cr3t-value"})
    assert name in problems["cluster.env"]
    assert "s3cr3t-value" not in str(problems)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("gcp__labels", {"token": TOKEN.lower()}, "gcp.labels.token"),
        ("gcp__persistent_resource_id", TOKEN, "gcp.persistent_resource_id"),
        ("data__source", f"gs://bucket/{TOKEN}/a.json", "data.source"),
        ("notify__email", (f"{TOKEN}@example.com",), "notify.email.0"),
    ],
)
def test_a_secret_in_any_field_is_refused_and_not_repeated(field: str, value: Any, place: str) -> None:
    problems = problems_of(**{field: value})
    assert "holds a secret (Hugging Face token)" in problems[place]
    assert TOKEN.lower() not in str(problems).lower()


@pytest.mark.parametrize("field", ["data__source", "train__strategy", "gcp__project", "cluster__timeout", "name"])
def test_a_secret_that_is_no_valid_value_is_not_repeated(field: str) -> None:
    problems = problems_of(**{field: f"https://ann:{TOKEN}@example.com"})
    assert problems and TOKEN not in str(problems)


def test_a_secret_of_another_type_is_not_repeated_either() -> None:
    assert "12345" not in str(problems_of(cluster__env={"HF_TOKEN": 12345}))


def test_a_name_that_only_contains_a_secret_word_is_allowed() -> None:
    assert small(cluster__env={"TOKENIZERS_PARALLELISM": "false"}).cluster.env


def test_requirements_of_vertex_are_checked_only_when_compiling_for_it() -> None:
    with pytest.raises(RunFileError) as caught:
        require_vertex(small())
    missing = {problem.field for problem in caught.value.problems}
    assert missing == {
        "gcp.project", "gcp.service_account", "gcp.pipeline_image", "gcp.pipeline_root", "cluster.image_uri"
    }  # fmt: skip


def test_local_data_is_refused_on_vertex() -> None:
    platform_of("vertex").check_files(small())
    with pytest.raises(RunFileError, match=r"data\.source"):
        platform_of("vertex").check_files(small(data__source="my-data/llava.json"))
    with pytest.raises(RunFileError, match=r"data\.source"):
        platform_of("vertex").check_files(small(data__source="my-data/mine.py:records"))
    for source in ("gs://bucket/mine.py:records", "my_package.readers:records"):  # of which the image has the module
        platform_of("vertex").check_files(small(data__source=source))
    in_cloud = {"uri": "gs://bucket/pope.json", "images": "gs://bucket/images"}
    platform_of("vertex").check_files(small(evaluate__benchmarks=[POPE | in_cloud]))
    with pytest.raises(RunFileError, match=r"evaluate\.benchmarks\.0\.images: found \"images\", expected a gs://"):
        platform_of("vertex").check_files(small(evaluate__benchmarks=[POPE | in_cloud | {"images": "images"}]))


ADAPTED = {
    "family": "hf", "pretrained": {"weights": "a/b"}, "tokenizer": "a/b", "lora": {"rank": 2, "export": "adapter"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"data__image_folder": "x"}, "data.image_folder"),
        ({"train__decay_fraction": 0.1}, "train.decay_fraction"),
        ({"train__tower_activation_checkpointing": True}, "train.tower_activation_checkpointing"),
        ({"cluster__max_wait_duration": "5s"}, "cluster.max_wait_duration"),
        (
            {"cluster__scheduling_strategy": "spot", "cluster__replica_count": 2},
            "cluster.restart_job_on_worker_restart",
        ),
        ({"train__strategy": "zero3", "train__deepspeed": NODE_COPY}, "train.deepspeed"),
        ({"cluster__image_uri": "example.com/a/b:v1"}, "cluster.image_uri"),
        ({"train__float8": "rowwise"}, "train.float8"),
        ({"checkpoint__export_dtype": "bf16", "model": ADAPTED}, "checkpoint.export_dtype"),
    ],
)
def test_a_setting_without_effect_or_with_a_pitfall_is_a_warning(overrides: dict[str, Any], field: str) -> None:
    assert field in {problem.field for problem in warnings(small(**overrides))}


def test_run_json_is_what_a_job_reads(tmp_path: Path) -> None:
    config, paths = small(), RunPaths(run_id="small-1", root_uri=str(tmp_path))
    content = config.to_run_json(paths)
    assert list(content)[:3] == ["version", "name", "run"]
    assert content["register"]["alias"] == "champion"
    (tmp_path / "run.json").write_text(json.dumps(content))
    job = JobConfig.load(str(tmp_path / "run.json"))
    assert (job.run, job.train, job.data) == (paths, config.train, config.data)


def test_the_file_with_all_defaults_is_the_same_run() -> None:
    config = small()
    again = parse_run_config(config.to_dict(), "again")
    assert again == config
    assert again.digest() == config.digest()
    assert small(train__epochs=2).digest() != config.digest()


def test_a_local_root_is_replaced_on_vertex() -> None:
    assert small().output.root_uri == DEFAULT_ROOT
    config = small(gcp__pipeline_root="gs://bucket/x")
    assert (config.output.root_uri, config.bucket_root_uri) == ("runs", "gs://bucket/x")
    assert small(output__root_uri="gs://b/y").bucket_root_uri == "gs://b/y"


def test_the_builtin_sources_are_those_of_the_data_step() -> None:
    from vlmpipe.trainer.data.sources import _builtin_sources
    from vlmpipe.trainer.data.sources.builtin import BUILTIN_PREFIX

    assert set(BUILTIN_SOURCES) == {BUILTIN_PREFIX + name for name in _builtin_sources()}


IGNORED = {"zero_optimization": {"stage3_max_live_parameters": 1, "allgather_partitions": True}, "aio": {}}


def of_zero2() -> dict[str, Any]:
    content = copy.deepcopy(SMALL)
    content["train"] |= {"strategy": "zero2", "deepspeed": IGNORED}
    return content


def test_keys_that_deepspeed_ignores_are_refused_in_a_new_run_in_one_round_with_others(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(of_zero2()))
    with pytest.raises(RunFileError) as refused:
        load_new_run(path)
    assert [problem.field for problem in refused.value.problems] == ["train.deepspeed"] * 3
    with pytest.raises(RunFileError) as both:
        load_new_run(path, ["train.epoch=2"])
    assert [problem.field for problem in both.value.problems] == ["train.epoch", *["train.deepspeed"] * 3]
    assert load_new_run(path, ["train.deepspeed={}"]).train.deepspeed == {}


def test_a_record_with_keys_that_deepspeed_ignores_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run_file.json"
    path.write_text(json.dumps(of_zero2()))
    content = load_run_file(path).to_run_json(RunPaths(run_id="r", root_uri=str(tmp_path)))
    assert JobConfig.model_validate(content).train.deepspeed == IGNORED
