"""Adapters on a frozen language model: trained by every strategy as by one process, resumed, exported, and kept to
their base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.adapters import built_model
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.equalities import RELATIVE, RELATIVE_BF16, begin_in_the_middle, trained_weights
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.strategies import DECOMPOSING
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import image_tokens_of
from vlmpipe.trainer.models.layers.freeze import is_adapter
from vlmpipe.trainer.storage import open_storage

STRATEGIES = chosen(dict.fromkeys(("ddp", "fsdp", "zero2", "tp")), lambda name: name == "tp")
# Adapters alone: in the short form those that drop out, for those beside rows of tokens equal one process.
ADAPTERS = "accumulated" if WHOLE else "straight"
# One strategy of each checkpoint format, and one that splits each adapter.
FORMATS = chosen(dict.fromkeys(("fsdp", "zero2", "tp")), lambda name: name == "tp")
# One that measures the weights it adapts while they are sharded (one that draws them is in SINGLE_ROWS); all of them in
# the long form.
EVERYWHERE = chosen(dict.fromkeys((*DECOMPOSING, "zero3")), lambda name: name == "fsdp")
COMPUTING = STRATEGIES if WHOLE else ()  # of whole weights: test_equalities.py
STOP_STEP = 2
ADAPTED = {
    "model.lora": {"rank": 4, "alpha": 8.0},
    "train.max_steps": 4 if WHOLE else 3,
    "train.optimizer.learning_rate": 0.005,
    # The tower's lora_A have gradients a ten-thousandth of the model's, made of their lora_B's first updates: with the
    # eps of other tests, rounding errors in those come to 2.4 times as much of the moments that are compared.
    "train.optimizer.eps": 1e-4,
}
DROPPING = {"model.lora": {"rank": 4, "alpha": 8.0, "dropout": 0.2}}
IN_ALL_PARTS = {
    "model.lora": {"rank": 4, "alpha": 8.0, "use_rslora": True, "parts": list(PARTS)},
    "model.freeze": [],
}
ROWS = {"model.train_parameters": ["*embed_tokens.weight", "lm_head.weight"]}  # whole, beside adapters of the blocks
BESIDE = ("fsdp", "ddp", "zero2", "tp") if WHOLE else ()
TOKENS = ["e", "s", "7"]  # of which the rows alone are trained
SINGLE_ROWS = chosen(dict.fromkeys(("ddp", "fsdp", "zero2", "zero3", "tp", "pp")), lambda name: name in ("tp", "zero3"))
TEXT = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def everywhere(strategy: str) -> tuple[str, str]:
    """The strategy, and whether its adapters in all parts are DoRA's."""
    return strategy, "decomposed" if strategy in DECOMPOSING else "everywhere"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained language model, as on the hub."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**TEXT, num_key_value_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, JobConfig]:
    """By what is done: `reference` on one process, all others on two."""
    root = tmp_path_factory.mktemp("lora")
    common = {"model.language_model": {"weights": str(base)}, "features.cache": "off", **ADAPTED}

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(root, name, {**common, **changes}, features="off")

    one = {"train.micro_batch_size": 8, **EVERY_STEP}
    references = {
        "reference": run("reference", one),
        "reference dropping": run("reference-dropping", DROPPING),
        "reference single rows": run("reference-single-rows", one | {"model.lora.train_tokens": TOKENS}),
        "reference decomposed": run("reference-decomposed", one | IN_ALL_PARTS | {"model.lora.use_dora": True}),
    }
    if any(everywhere(strategy)[1] == "everywhere" for strategy in EVERYWHERE):
        references["reference everywhere"] = run("reference-everywhere", one | IN_ALL_PARTS)
    if BESIDE:
        references["reference rows"] = run("reference-rows", one | ROWS)
    train_runs(list(references.values()), processes=1)
    made: dict[str, JobConfig] = {}
    for strategy in EVERYWHERE:
        _, how = everywhere(strategy)
        changes = strategy_changes(strategy) | IN_ALL_PARTS | {"model.lora.use_dora": how == "decomposed"}
        made[f"{strategy} {how}"] = run(f"{strategy}-{how}", changes)
    made |= {f"{name} rows": run(f"{name}-rows", strategy_changes(name) | ROWS) for name in BESIDE}
    for strategy in SINGLE_ROWS:
        here = strategy_changes(strategy) | {"model.lora.train_tokens": TOKENS}
        made[f"{strategy} single rows"] = run(f"{strategy}-single-rows", here)
    for strategy in COMPUTING:
        here = strategy_changes(strategy)
        made |= {
            f"{strategy} accumulated": run(f"{strategy}-accumulated", here),
            f"{strategy} bf16": run(f"{strategy}-bf16", {**here, "train.precision": "bf16"}),
            f"{strategy} checkpointing": run(f"{strategy}-again", {**here, "train.activation_checkpointing": "full"}),
        }
    for strategy in FORMATS:
        here = strategy_changes(strategy)
        dropping = {**here, **DROPPING, "train.checkpoint_every_steps": STOP_STEP}
        made[f"{strategy} straight"] = run(f"{strategy}-straight", dropping)
    train_runs(list(made.values()), processes=2)
    resumed = {
        f"{strategy} resumed": run(f"{strategy}-resumed", {**strategy_changes(strategy), **DROPPING})
        for strategy in FORMATS
    }
    for strategy in FORMATS:
        begin_in_the_middle(resumed[f"{strategy} resumed"], made[f"{strategy} straight"], STOP_STEP)
    train_runs(list(resumed.values()), processes=2)
    return {**references, **made, **resumed}


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        *((f"{strategy} accumulated", "reference") for strategy in COMPUTING),
        *((f"{strategy} rows", "reference rows") for strategy in BESIDE),
        *((f"{strategy} single rows", "reference single rows") for strategy in SINGLE_ROWS),
        *((f"{strategy} {how}", f"reference {how}") for strategy, how in map(everywhere, EVERYWHERE)),
    ],
)
def test_adapters_trained_by_two_processes_equal_those_of_one(
    name: str, reference: str, runs: dict[str, JobConfig]
) -> None:
    found, expected = runs[name], runs[reference]
    assert summary(found)["world_size"] == 2
    require_equal_training(found, expected)


@pytest.mark.parametrize("name", ["reference", *SINGLE_ROWS])
def test_of_embedding_and_head_the_named_tokens_rows_learn_alone(
    name: str, base: Path, runs: dict[str, JobConfig]
) -> None:
    """In checkpoints, with the decay of all weights on: every other row is the base's to the bit."""
    job = runs[f"{name} single rows"]
    tokenizer = load_tokenizer(open_prepared(job.pointers().prepared_uri))
    tokens = set(tokenizer.convert_tokens_to_ids(TOKENS))
    trained, model = trained_weights(job), Qwen2ForCausalLM.from_pretrained(base)
    rows = {"embed_tokens": model.get_input_embeddings().weight, "lm_head": model.lm_head.weight}
    assert job.train.optimizer.weight_decay > 0
    for part, weight in rows.items():
        (found,) = (tensor for name, tensor in trained.items() if part in name)
        changed = (found[: len(weight)] != weight).any(1).nonzero().flatten().tolist()
        assert changed and tokens.issuperset(changed), part


@pytest.mark.parametrize("strategy", COMPUTING)
def test_bf16_stays_close_and_activation_checkpointing_changes_no_number(
    strategy: str, runs: dict[str, JobConfig]
) -> None:
    expected = losses(runs[f"{strategy} accumulated"])
    assert losses(runs[f"{strategy} checkpointing"]) == pytest.approx(expected, rel=RELATIVE)
    assert losses(runs[f"{strategy} bf16"]) == pytest.approx(expected, rel=RELATIVE_BF16)
    assert losses(runs[f"{strategy} bf16"]) != expected


@pytest.mark.parametrize("strategy", FORMATS)
def test_a_resumed_run_has_the_dropout_of_the_uninterrupted_one(strategy: str, runs: dict[str, JobConfig]) -> None:
    """Bit for bit, weights and losses."""
    straight, resumed = runs[f"{strategy} straight"], runs[f"{strategy} resumed"]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert losses(resumed) == losses(straight)
    found, expected = trained_weights(resumed), trained_weights(straight)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert losses(straight)[1:] != pytest.approx(losses(runs["reference"])[1:], rel=RELATIVE)


def test_sharded_adapters_have_the_dropout_of_one_process(runs: dict[str, JobConfig]) -> None:
    """They draw the same numbers, and of those for an input that is split each takes its own."""
    found, expected = losses(runs["tp straight"]), losses(runs["reference dropping"])
    assert found == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_adapters_and_projector_and_nothing_else(strategy: str, runs: dict[str, JobConfig]) -> None:
    job = runs[f"{strategy} {ADAPTERS}"]
    weights = trained_weights(job)
    built = built_model(job)
    assert weights.keys() == {name for name, weight in built.named_parameters() if weight.requires_grad}
    assert {is_adapter(name) or "multi_modal_projector" in name for name in weights} == {True}
    assert sum(map(is_adapter, weights)) == 2 * 7 * 2, "two matrices for each of seven linear layers in two blocks"
    assert not any(built.get_parameter(name).equal(weight) for name, weight in weights.items()), "all of it learns"


@pytest.mark.slow
def test_rows_of_tokens_learn_beside_adapters(runs: dict[str, JobConfig]) -> None:
    job = runs["fsdp rows"]
    weights, built = trained_weights(job), built_model(job)
    rows = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
    assert weights.keys() > set(rows) and sum(map(is_adapter, weights)) == 2 * 7 * 2
    assert not any(built.get_parameter(name).equal(weights[name]) for name in rows)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{strategy} {ADAPTERS}" for strategy in STRATEGIES),
        "fsdp decomposed",
        *(f"{one} rows" for one in BESIDE[:1]),
    ],
)
def test_an_export_has_the_adapters_merged_and_answers_as_the_trained_module(
    name: str, runs: dict[str, JobConfig], base: Path
) -> None:
    job = runs[name]
    sync_run(job)
    exported = AutoModelForImageTextToText.from_pretrained(Path(job.run.run_uri, "export"), dtype=torch.float32).eval()
    trained, untrained = built_model(job).eval(), built_model(job).eval()
    with torch.no_grad():
        for weight_name, weight in trained_weights(job).items():
            trained.get_parameter(weight_name).copy_(weight)
    side, tokens = job.model.image_size, image_tokens_of(job.model)(1, 1)
    image_token = int(exported.config.image_token_id)
    inputs = {
        "input_ids": torch.tensor([[5, *[image_token] * tokens, 9, 2, 7, 30]]),
        "pixel_values": torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)),
    }
    with torch.no_grad():
        found, expected, before = (model(**inputs).logits for model in (exported, trained, untrained))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 0.01, "the adapters must have learned for that to mean anything"
    own = dict(load_file(base / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    merged = exported.get_parameter("model.language_model.layers.0.mlp.up_proj.weight")
    if ADAPTERS in name:
        assert torch.linalg.matrix_rank(merged.detach() - own, atol=1e-5) == 4


def test_adapters_are_not_exported_onto_another_base(runs: dict[str, JobConfig], base: Path) -> None:
    """A hub repository that is not pinned, or a folder, may hold other weights by then."""
    job = runs[f"tp {ADAPTERS}"]
    store = open_storage(job.run.run_uri)
    sync_run(job)
    before = store.list("export")
    checkpoint, _ = newest_good(store)
    assert checkpoint is not None
    newer = dataclasses.replace(checkpoint, name="9999-00000009-later")
    file = base / "model.safetensors"
    content = file.read_bytes()
    other = {name: tensor * (1.01 if name == "model.norm.weight" else 1) for name, tensor in load_file(file).items()}
    save_file(other, file, {"format": "pt"})
    try:
        with pytest.raises(ConfigError, match=r"frozen weights under checkpoint .* were others"):
            export_checkpoint(job, store, newer, [])
    finally:
        file.write_bytes(content)
    assert store.list("export") == before
    assert sync_run(job)["reused"], "onto its own base"
