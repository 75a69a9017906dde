"""Context parallelism equals one process, for every family: packed sequences whose samples and images lie across the
border between two ranks, levels of DeepStack, key and value heads that are repeated.

In the short form two ranks share sequences, under FSDP and DDP. Runs stop and go on with another degree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import (
    RELATIVE,
    RELATIVE_BF16,
    TOWER_TRAINED,
    begin_in_the_middle,
    trained_weights,
)
from tests.support.trainer.native_runs import STEPS, STOP_STEP, Content, base_of, train
from tests.support.trainer.runs import encode_features, losses, make_run, metrics, summary, train_runs
from tests.support.trainer.tiny_native import CONFIGS
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig

FAMILIES = chosen(dict.fromkeys(("llava", *CONFIGS)), lambda name: name in ("llava", "qwen3_vl"))
TWO, FOUR = ({"train.context_parallel": degree} for degree in (2, 4))
ADAPTED: Content = {"model.lora": {"rank": 4, "alpha": 8.0}}
QUANTIZED: Content = {"model.lora": {"rank": 4, "alpha": 8.0, "quantize_base": "nf4"}}
UNPACKED: Content = {"data.pack": False, "train.global_batch_size": 4}
FULL, SELECTIVE = ({"train.activation_checkpointing": kind} for kind in ("full", "selective"))
COMPILED: Content = {"train.compile": "on", "train.compile_backend": "aot_eager"}
VALIDATED: Content = {"train.validate_every_steps": STOP_STEP, "train.validation_sequences": 3}
# Reference runs of one process.
REFERENCES: dict[str, Content] = {
    "trained tower": TOWER_TRAINED | VALIDATED,
    "frozen tower": {},
    "adapters": ADAPTED,
    "nf4": QUANTIZED,
    "unpacked": TOWER_TRAINED | UNPACKED,
    "bf16": TOWER_TRAINED | {"train.precision": "bf16"},
}
# On how many processes, by what strategy, with what changes, and the reference that it equals.
CASES: dict[str, tuple[int, str, Content, str]] = chosen(
    {
        "fsdp": (2, "fsdp", TWO | FULL, "trained tower"),
        "ddp": (2, "ddp", TWO, "trained tower"),
        "ddp frozen tower": (2, "ddp", TWO | SELECTIVE, "frozen tower"),
        "ddp of four": (4, "ddp", FOUR, "trained tower"),
        "ddp compiled": (2, "ddp", TWO | COMPILED, "trained tower"),
        "fsdp compiled": (2, "fsdp", TWO | COMPILED | SELECTIVE, "trained tower"),
        "zero2 compiled": (2, "zero2", TWO | COMPILED, "trained tower"),
        "fsdp selective": (2, "fsdp", TWO | SELECTIVE, "trained tower"),
        "fsdp adapters": (2, "fsdp", TWO, "adapters"),
        "fsdp nf4": (2, "fsdp", TWO, "nf4"),
        "ddp nf4": (2, "ddp", TWO, "nf4"),
        "fsdp unpacked": (2, "fsdp", TWO | {"train.micro_batch_size": 4}, "unpacked"),
        "fsdp cached": (2, "fsdp", TWO | {"features.cache": "on"}, "frozen tower"),
        "fsdp all logits": (2, "fsdp", TWO | {"train.loss_chunk_tokens": 0}, "trained tower"),
        "fsdp two groups": (4, "fsdp", TWO, "trained tower"),
        "fsdp two groups unpacked": (4, "fsdp", TWO, "unpacked"),
        "hsdp": (4, "hsdp", TWO, "trained tower"),
        "hsdp offloaded": (4, "hsdp", TWO | FULL | {"train.activation_offloading": True}, "trained tower"),
        "zero1": (2, "zero1", TWO, "trained tower"),
        "zero2": (4, "zero2", TWO, "trained tower"),
        "zero3": (2, "zero3", TWO | FULL, "trained tower"),
        "fsdp bf16": (2, "fsdp", TWO, "bf16"),
        "ddp bf16": (2, "ddp", TWO, "bf16"),
        "zero2 bf16": (2, "zero2", TWO, "bf16"),
        "ddp bf16 gradients": (2, "ddp", TWO | {"train.gradient_compression": "bf16"}, "trained tower"),
    },
    lambda name: name in ("fsdp", "ddp"),
)
ROUNDED = [name for name, case in CASES.items() if case[-1] == "bf16" or "train.gradient_compression" in case[2]]
# Each family and each way once in the short form.
EXACT = [
    (family, name)
    for family in FAMILIES
    for name in CASES
    if name not in ROUNDED and (WHOLE or (family, name) != ("llava", "fsdp"))
]
# Who begins a run and who goes on with it: processes, and degree.
MOVES = chosen(
    {
        "2 to 1": ((2, 2), (1, 1)),
        "1 to 2": ((1, 1), (2, 2)),
        "2 of 4 to 4": ((4, 2), (4, 4)),
        "2 to 2": ((2, 2), (2, 2)),
    },
    lambda name: name in ("2 to 1", "2 to 2"),
)
FROM_FSDP = ("2 to 1", "2 to 2")  # which go on from the middle of the case `fsdp`
MOVED = [*FAMILIES] if WHOLE else ["qwen3_vl"]
TIMEOUT_S = 1200 if WHOLE else 240
Runs = dict[tuple[str, str], JobConfig]  # by family and name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All families in the same processes: starting them takes longer than these runs do."""
    root, done = tmp_path_factory.mktemp("context"), Runs()
    base = {family: _base(root, family) for family in FAMILIES}

    def job(family: str, name: str, changes: Content) -> JobConfig:
        features = "reuse" if changes.get("features.cache") == "on" else "off"
        return make_run(root, f"{family}-{name.replace(' ', '-')}", {**base[family], **changes}, features=features)

    begun: list[tuple[int, JobConfig]] = []
    on_two_nodes: list[JobConfig] = []
    for family in FAMILIES:
        for name in sorted({reference for *_, reference in CASES.values()}):
            done[family, name] = job(family, name, REFERENCES[name])
            begun.append((1, done[family, name]))
        for name, (processes, strategy, changes, reference) in CASES.items():
            if (family, name) not in EXACT and name not in ROUNDED:
                continue
            layout = {"train.strategy": strategy, "train.checkpoint_every_steps": STOP_STEP}
            done[family, name] = job(family, name, REFERENCES[reference] | changes | layout)
            if changes.get("features.cache") == "on":
                encode_features(done[family, name])
            if strategy == "hsdp":
                on_two_nodes.append(done[family, name])
            else:
                begun.append((processes, done[family, name]))
    if on_two_nodes:
        train_runs(on_two_nodes, processes=2, nodes=2, timeout_s=TIMEOUT_S)

    def moved(family: str, name: str, last: int) -> tuple[int, JobConfig]:
        processes, degree = MOVES[name][last == STEPS]
        layout = {"train.strategy": "fsdp", "train.context_parallel": degree, "train.max_steps": last}
        done[family, name] = job(family, f"moved {name}", TOWER_TRAINED | VALIDATED | FULL | layout)
        return processes, done[family, name]

    others = [name for name in MOVES if name not in FROM_FSDP]
    train([*begun, *(moved(family, name, STOP_STEP) for family in MOVED for name in others)], timeout_s=TIMEOUT_S)
    ended = [moved(family, name, STEPS) for family in MOVED for name in MOVES]
    for family in MOVED:
        for name in FROM_FSDP:
            begin_in_the_middle(done[family, name], done[family, "fsdp"], STOP_STEP)
    train(ended, timeout_s=TIMEOUT_S)
    return done


def _base(root: Path, family: str) -> Content:
    steps = {
        "features.cache": "off",
        "train.max_steps": STEPS,
        "train.global_batch_size": 2,
        "train.micro_batch_size": 1,
    }
    if family == "llava":  # one key and value head, for two ranks
        return steps | {"model.language_model.config.num_key_value_heads": 1}
    return base_of(root, family)


@pytest.mark.parametrize(("family", "name"), EXACT)
def test_losses_and_gradients_are_those_of_one_process(family: str, name: str, runs: Runs) -> None:
    processes, *_, reference = CASES[name]
    job, expected = runs[family, name], runs[family, reference]
    assert summary(job)["world_size"] == processes
    assert losses(job) == pytest.approx(losses(expected), rel=RELATIVE)
    norms, of_one = ([line["grad_norm"] for line in metrics(each)] for each in (job, expected))
    assert norms == pytest.approx(of_one, rel=RELATIVE)
    validated, of_reference = (_validation_losses(each) for each in (job, expected))
    assert validated == pytest.approx(of_reference, rel=RELATIVE)
    # The last step is always validated, where there is a validation split.
    assert len(validated) == (2 if reference == "trained tower" else 1)
    assert summary(job)["tokens"] == summary(expected)["tokens"]


@pytest.mark.parametrize(("family", "name"), EXACT)
def test_weights_are_those_of_one_process(family: str, name: str, runs: Runs) -> None:
    weights, expected = (trained_weights(runs[family, each]) for each in (name, CASES[name][-1]))
    assert weights.keys() == expected.keys()
    for each, tensor in expected.items():
        apart = weights[each] - tensor
        assert float(apart.square().mean().sqrt()) < 2e-5, each
        # AdamW divides by the size of a gradient: of one that is next to nothing, rounding decides a part of the step.
        assert float(apart.abs().max()) < TINY["train"]["optimizer"]["learning_rate"] / 10, each


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_less_precision_is_within_its_rounding(family: str, name: str, runs: Runs) -> None:
    expected = runs[family, CASES[name][-1]]
    assert losses(runs[family, name]) == pytest.approx(losses(expected), rel=RELATIVE_BF16)


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("family", MOVED)
def test_a_run_goes_on_with_any_degree(family: str, name: str, runs: Runs) -> None:
    job, expected = runs[family, name], runs[family, "trained tower"]
    assert summary(job)["resumed_from_step"] == STOP_STEP
    assert len(losses(job)) == len(losses(expected)) == STEPS
    assert losses(job) == pytest.approx(losses(expected), rel=RELATIVE)
    assert _validation_losses(job) == pytest.approx(_validation_losses(expected), rel=RELATIVE)


@pytest.mark.parametrize("family", MOVED)
def test_a_resumed_run_is_bit_equal(family: str, runs: Runs) -> None:
    resumed, straight = runs[family, "2 to 2"], runs[family, "fsdp"]
    assert losses(resumed) == losses(straight)
    weights, expected = trained_weights(resumed), trained_weights(straight)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def _validation_losses(job: JobConfig) -> list[float]:
    return [line["validation_loss"] for line in metrics(job) if "validation_loss" in line]
