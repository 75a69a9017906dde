"""Exports: tensor by tensor what transformers itself would write, from every checkpoint format, in little memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from tests.support.short_form import chosen
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.preloaded import REPOSITORY
from tests.support.trainer.runs import make_run, summary, train_runs
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.registry.model_card import model_card
from vlmpipe.trainer.checkpoint.commit import Checkpoint, checkpoint_name, commit, upload_node_files
from vlmpipe.trainer.checkpoint.export.hf_export import Merged, export_checkpoint
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.checkpoint.export.weight_reader import open_weights
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, fetch_folder
from vlmpipe.trainer.config.checkpoint import CheckpointConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.tokenize import load_tokenizer, make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.weights_digest import model_sha256, weights_sha256

# One of each format of checkpoints; of ZeRO-2's masters and averages: `averaged`, and test_mixed_precision.py.
STRATEGIES = chosen(dict.fromkeys(("ddp", "fsdp", "zero1", "zero2", "zero3")), lambda name: name in ("ddp", "zero3"))
TIED = {"model.language_model.config.tie_word_embeddings": True}
SMALL_SHARD_BYTES = 20_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """A trained run of each strategy on two processes; those of FSDP and ZeRO-3 with tied embeddings."""
    root = tmp_path_factory.mktemp("export")
    changes: dict[str, Any] = {"train.max_steps": 2, "features.cache": "off"}
    jobs = {
        strategy: make_run(
            root,
            strategy,
            {**changes, "train.strategy": strategy, **(TIED if strategy in ("fsdp", "zero3") else {})},
            features="off",
        )
        for strategy in STRATEGIES
    }
    averaged = {"train.ema_decay": 0.6, "train.strategy": "zero2"}
    jobs["averaged"] = make_run(root, "averaged", {**changes, **averaged}, features="off")
    train_runs(list(jobs.values()), processes=2)
    return jobs


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"])


def newest(job: JobConfig) -> Checkpoint:
    checkpoint, _ = newest_good(open_storage(job.run.run_uri))
    assert checkpoint is not None
    return checkpoint


def whole_model(job: JobConfig) -> nn.Module:
    """The trained model the simple way: built whole, with the checkpoint's weights read whole."""
    model = family_of(job.model).build(job.model, load_tokenizer(open_storage(job.pointers().prepared_uri)))
    wanted = {f"model.{name}": weight for name, weight in model.named_parameters() if weight.requires_grad}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        checkpoint = newest(job)
        folder = fetch_folder(open_storage(job.run.run_uri), checkpoint, Path(scratch))
        state = {"model": {name: torch.empty_like(weight) for name, weight in wanted.items()}}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        for name, weight in wanted.items():
            weight.copy_(state["model"][name])
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different and all(found[name].dtype == expected[name].dtype for name in expected)


def save_as_published(model: Any, folder: Path) -> None:
    """As transformers saves a published model that it has loaded: with the prefixes that it dropped."""
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    model.save_pretrained(folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_export_equals_what_transformers_writes(strategy: str, runs: dict[str, JobConfig], tmp_path: Path) -> None:
    job = runs[strategy]
    described = sync_run(job)
    model = whole_model(job)
    save_as_published(model, tmp_path)
    folder = Path(job.run.run_uri, "export")
    assert_equal(tensors_of(folder), tensors_of(tmp_path))
    assert described["weights_sha256"] == weights_sha256(model)
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path))
    inside = {name: ours[name] | theirs[name] for name in ("text_config", "vision_config")}
    assert ours | theirs | inside == ours, "some is added"
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert_equal(loaded.state_dict(), model.state_dict())
    AutoProcessor.from_pretrained(folder)


def test_averaged_weights_are_exported_and_marked(runs: dict[str, JobConfig]) -> None:
    job = runs["averaged"]
    described = sync_run(job)
    assert described["averaged"] and summary(job)["ema_decay"] == 0.6
    assert "exponential moving average over the steps, decay 0.6" in model_card(job, Evaluation(), Summary(), model="m")
    folder = Path(job.run.run_uri, "export")
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    averages, weights = trained_weights(job, averaged=True), trained_weights(job)
    assert all(torch.equal(loaded[name], average) for name, average in averages.items())
    assert not all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert sync_run(job)["reused"]
    without = job.model_copy(update={"train": job.train.model_copy(update={"ema_decay": 0.0})})
    assert not sync_run(without)["averaged"]
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_an_export_in_shards_replaces_one_in_a_single_file(runs: dict[str, JobConfig]) -> None:
    """from_pretrained takes model.safetensors where there is one, whatever the index says."""
    job = runs["ddp"]
    folder = Path(job.run.run_uri, "export")
    sync_run(job)
    whole = tensors_of(folder)
    (folder / "vlmpipe.json").unlink()
    described = export_checkpoint(
        job, open_storage(job.run.run_uri), newest(job), [], max_shard_bytes=SMALL_SHARD_BYTES
    )
    assert not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert_equal(tensors_of(folder), whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    for tensors in map(load_file, files):
        assert index["weight_map"].keys() >= tensors.keys()
        assert sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_SHARD_BYTES or len(tensors) == 1
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert weights_sha256(loaded) == described["weights_sha256"]


def test_an_export_is_made_again_in_another_type(runs: dict[str, JobConfig]) -> None:
    job = runs["zero3"]
    sync_run(job)
    weights = Path(job.run.run_uri, "export", "model.safetensors")
    size = weights.stat().st_size
    changed = job.model_copy(update={"checkpoint": CheckpointConfig(export_dtype="bf16")})
    described = sync_run(changed)
    assert (described["dtype"], described["reused"]) == ("bf16", False)
    assert size / 2 < weights.stat().st_size < 0.6 * size, "half of it but for the header"
    assert sync_run(changed)["reused"] and not sync_run(job)["reused"]


@pytest.mark.parametrize("how", ["flip", "remove", "extra"])
def test_a_damaged_export_is_made_again_and_a_whole_one_is_not(runs: dict[str, JobConfig], how: str) -> None:
    job = runs["averaged"]
    sync_run(job)
    store = open_storage(job.run.run_uri)
    before = {info.name: store.read(info.name) for info in store.list("export")}
    assert sync_run(job)["reused"]
    weights = Path(job.run.run_uri, "export", "model.safetensors")
    if how == "flip":
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    elif how == "remove":
        weights.unlink()
    else:
        store.write("export/model-00001-of-00002.safetensors", b"of another export")
    assert not sync_run(job)["reused"]
    assert {info.name: store.read(info.name) for info in store.list("export")} == before


def test_checkpoint_of_another_model_leaves_the_export_unchanged(runs: dict[str, JobConfig]) -> None:
    job = runs["zero3"]
    sync_run(job)
    store, checkpoint = open_storage(job.run.run_uri), newest(job)
    before = store.list("export")
    newer = dataclasses.replace(checkpoint, name="9999-00000009-later")
    other = job.model_copy(update={"model": job.model.model_copy(update={"seed": 1})})
    with pytest.raises(ConfigError, match="another model section"):
        export_checkpoint(other, store, newer, [])
    other_tower = dataclasses.replace(newer, record=dataclasses.replace(newer.record, tower_sha256="0" * 64))
    with pytest.raises(ConfigError, match="frozen tower"):
        export_checkpoint(job, store, other_tower, [])
    assert store.list("export") == before


def test_missing_or_misshapen_weights_are_named(runs: dict[str, JobConfig], tmp_path: Path) -> None:
    job = runs["ddp"]
    family, checkpoint = family_of(job.model), newest(job)
    tokenizer = load_tokenizer(open_storage(job.pointers().prepared_uri))
    files = CheckpointFiles.of(open_storage(job.run.run_uri), checkpoint)
    trained = open_weights(files, checkpoint.record.checkpoint_format)
    initial = family.initial_weights(job.model, tokenizer)
    more_is_trained = family.blueprint(job.model.model_copy(update={"freeze": ()}), tokenizer)
    with pytest.raises(ConfigError, match=r"lacks \d+ trained weights, for example model.vision_tower"):
        Merged(more_is_trained, trained, initial)
    text = {**job.model.language_model.config, "intermediate_size": 65}
    wider = job.model.model_copy(update={"language_model": WeightsConfig(config=text)})
    blueprint = family.blueprint(wider, tokenizer)
    merged = Merged(blueprint, trained, initial)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"down_proj.weight is \(32, 64\)"):
        write_weights(blueprint, merged.read, tmp_path / "out")


def test_an_unknown_checkpoint_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format is 'zero3'"):
        open_weights(CheckpointFiles(open_storage(str(tmp_path)), "name", {}), "zero3")


def save_language(folder: Path, *, tied: bool, **save: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    text = {**TINY["model"]["language_model"]["config"], "vocab_size": 280, "tie_word_embeddings": tied}
    Qwen2ForCausalLM(Qwen2Config(**text)).to(torch.bfloat16).save_pretrained(folder, **save)
    return {"weights": str(folder)}


def save_tower(folder: Path) -> dict[str, Any]:
    torch.manual_seed(4)
    vision = SiglipVisionConfig(**{**TINY["model"]["tower"]["config"], "image_size": 32})
    SiglipVisionModel(vision).save_pretrained(folder)
    SiglipImageProcessorPil().save_pretrained(folder)
    return {"weights": str(folder)}


def experts(folder: Path) -> dict[str, Any]:
    """A language model whose files hold expert by expert what the model holds in one tensor."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(5)
    text = {**TINY["model"]["language_model"]["config"], "vocab_size": 280, "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**text)).save_pretrained(folder)
    return {"weights": str(folder)}


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "drawn": lambda folder: {},
    "pretrained-tower": lambda folder: {"tower": save_tower(folder)},
    "pretrained-language": lambda folder: {"language_model": save_language(folder, tied=False)},
    "tied-language": lambda folder: {"language_model": save_language(folder, tied=True)},
    "language-in-shards": lambda folder: {"language_model": save_language(folder, tied=False, max_shard_size="20KB")},
    "experts": lambda folder: {"language_model": experts(folder)},
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_taken_from_their_source_one_by_one_are_those_of_the_whole_model(
    source: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """What is frozen is not in the checkpoint: the export must find what training built."""
    config = ModelConfig.model_validate(TINY["model"] | SOURCES[source](tmp_path))
    family = family_of(config)
    model = family.build(config, tokenizer)
    blueprint, initial = family.blueprint(config, tokenizer), family.initial_weights(config, tokenizer)
    assert_equal({name: initial.read(name) for name in sorted(blueprint.state_dict())}, model.state_dict())
    assert all(weight.is_meta for weight in blueprint.parameters())
    (tmp_path / "ours").mkdir()
    written = write_weights(blueprint, initial.read, tmp_path / "ours")
    save_as_published(model, tmp_path / "theirs")
    assert written.weights_sha256 == weights_sha256(model)
    save_settings(family, config, blueprint, tokenizer, tmp_path / "ours")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_equal(loaded.state_dict(), model.state_dict())
    assert_equal(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))


@pytest.mark.slow
def test_export_memory_is_that_of_a_shard(tmp_path: Path) -> None:
    """Measured as the process's own peak, beside that of the whole model in the same process."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8}
    text = {f"model.language_model.config.{name}": value for name, value in wide.items()}
    job = make_run(tmp_path, "wide", {**text, "features.cache": "off"}, features="off")
    model_bytes = commit_untrained(job, tmp_path / "staging")
    assert model_bytes > 140 * MIB
    command = [sys.executable, "-m", "tests.support.drivers.export_in_little_memory", "--max-shard-bytes", str(8 * MIB)]
    done = subprocess.run(
        [*command, "--config", f"{job.run.run_uri}/run.json"],
        cwd=REPOSITORY,
        # glibc otherwise keeps what was freed, and the process's peak would tell of its habits
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    grown = json.loads(done.stdout.splitlines()[-1])
    assert sum(name.endswith(".safetensors") for name in grown["files"]) > 10
    assert grown["build"] > model_bytes, "the measure sees a model"
    assert grown["export"] < 4 * 8 * MIB, grown  # a tensor, as read and as stored, and what copying a file takes


def commit_untrained(job: JobConfig, staging: Path) -> int:
    """A committed checkpoint of the model as it was built. Returns the model's size in bytes."""
    family, store = family_of(job.model), open_storage(job.run.run_uri)
    model = family.build(job.model, load_tokenizer(open_storage(job.pointers().prepared_uri)))
    state = {f"model.{name}": weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(staging, single_file_per_rank=True), no_dist=True)
    record = CommitRecord(
        attempt=0,
        epoch=0,
        step=1,
        sequences_consumed=1,
        world_size=1,
        num_nodes=1,
        strategy="ddp",
        checkpoint_format="dcp",
        plan_sha256="",
        model_sha256=model_sha256(job),
        tower_sha256=weights_sha256(family.tower(model)),
        versions={},
    )
    name = checkpoint_name(0, 1, "untrained")
    upload_node_files(store, name, 0, staging)
    commit(store, name, record)
    return sum(weight.nbytes for weight in model.parameters())
