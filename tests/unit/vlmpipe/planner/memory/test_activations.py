"""Activation memory: extrapolated from few layers and sequences, and less with recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.short_form import chosen
from tests.support.trainer.memory_cases import Case
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.memory import pipeline_stage as stage_memory
from vlmpipe.planner.memory.activations import activations
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.sizing.pipeline_partition import Stage
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape
from vlmpipe.trainer.tracing.pipeline_stage import trace_stage
from vlmpipe.trainer.tracing.step import trace_step

DEEP = {
    f"{precision}-{name}": (precision, freeze)
    for precision in ("bf16", "fp32")
    for name, freeze in (("frozen tower", ["tower"]), ("trained tower", []))
}


@pytest.mark.parametrize(
    ("precision", "freeze"), chosen(DEEP, lambda name: name in ("bf16-frozen tower", "fp32-trained tower")).values()
)
def test_memory_of_many_layers_is_extrapolated_from_few(precision: str, freeze: list[str]) -> None:
    """Two language layers, and of a frozen tower the first and the last, against a trace of the whole depth."""
    config = _small({"num_hidden_layers": 7}, tower={"num_hidden_layers": 9}, freeze=freeze, precision=precision)
    shape = architecture(config).shape
    found = activations(config, shape, mixes=[(2, 40)])
    whole = trace_step(
        ModelConfig.model_validate(config.model.model_dump()),
        SequenceShape(config.train.micro_batch_size, config.data.sequence_length, 4, 80),
        vocabulary=shape.vocabulary,
        cached=False,
        compute="bf16 weights" if precision == "bf16" else "fp32",
        recompute=Recompute.of(config.train),
        language_layers=7,
        every_layer=True,
    )
    assert sum(found.forward.values()) == whole.forward.total_bytes
    # With bf16 weights, but for the 256 bytes of a norm's gradient.
    assert sum(found.backward.values()) == pytest.approx(whole.backward.total_bytes, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_memory_of_many_layers_of_a_native_model_is_extrapolated_from_few(family: str) -> None:
    """Its own tower, and the levels that are added to its first language layers."""
    config = Case("ddp", {"features.cache": "off"}, cached=False, family=family).config(1)
    shape = architecture(config).shape
    found = activations(config, shape, mixes=[(2, 40)])
    whole = trace_step(
        config.model,
        SequenceShape(config.train.micro_batch_size, config.data.sequence_length, 4, 80),
        vocabulary=shape.vocabulary,
        cached=False,
        compute="fp32",
        recompute=Recompute.of(config.train),
        language_layers=shape.language.layers,
        every_layer=True,
    )
    assert sum(found.forward.values()) == whole.forward.total_bytes
    assert sum(found.backward.values()) == whole.backward.total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def test_memory_of_a_native_models_first_stage_is_extrapolated_from_few_layers(family: str) -> None:
    """Two levels are added to the first layers of Qwen3-VL."""
    deep = {"features.cache": "off", "model.pretrained.config.text_config.num_hidden_layers": 8}
    config = Case("pp", deep, cached=False, family=family).config(2)
    shape = architecture(config).shape
    stage = Stage(range(7), is_first=True, is_last=False)
    found = stage_memory._Stage.traced(config, shape, stage, (2, 40), from_one_sequence=False)
    whole = trace_stage(
        config.model,
        SequenceShape(config.train.micro_batch_size, config.data.sequence_length, 4, 80),
        stage,
        vocabulary=shape.vocabulary,
        cached=False,
        compute="fp32",
        recompute=Recompute.of(config.train),
    )
    assert found.forward.total() == whole.forward.total_bytes
    assert found.saved.total() == whole.saved.total_bytes
    assert found.backward.total() == whole.backward.total_bytes


@pytest.mark.slow
def test_memory_of_several_sequences_is_extrapolated_from_one_and_two() -> None:
    one, two, three = (_small(rows=rows) for rows in (1, 2, 3))
    shape = architecture(one).shape
    of_one, of_two, many = (activations(each, shape, mixes=[(2, 40)]) for each in (one, two, three))
    scaled = of_one.of_sequences(3, of_two)
    assert sum(scaled.forward.values()) == pytest.approx(sum(many.forward.values()), rel=0.02)
    assert sum(scaled.backward.values()) == pytest.approx(sum(many.backward.values()), rel=0.02)


def test_a_recomputed_tower_takes_less_memory_where_it_is_trained() -> None:
    config = _small(tower={"num_hidden_layers": 6})
    for freeze, is_less in (((), True), (("tower",), False)):
        model = config.model.model_copy(update={"freeze": freeze, "feature_layer": -1})  # else no layer gets gradients
        features = config.features.model_copy(update={"cache": "off"})
        config = config.model_copy(update={"model": model, "features": features})
        shape = architecture(config).shape
        kept, again = (
            activations(
                config.model_copy(
                    update={"train": config.train.model_copy(update={"tower_activation_checkpointing": value})}
                ),
                shape,
                mixes=[(2, 40)],
            ).forward["vision"]
            for value in (False, True)
        )
        assert (again < 0.5 * kept) if is_less else (again == kept)


def test_more_recomputation_takes_less_memory() -> None:
    config = _small(precision="bf16-autocast")  # whose forward pass is fullest in the loss
    shape = architecture(config).shape

    def held(category: str, **train: Any) -> int:
        changed = config.model_copy(update={"train": config.train.model_copy(update=train)})
        return activations(changed, shape, mixes=[(1, 300)]).forward[category]

    layers = [held("language", activation_checkpointing=kind) for kind in ("none", "selective", "full")]
    assert layers[0] > 1.5 * layers[1] > 3 * layers[2]
    at_once, half, quarter = (held("head", loss_chunk_tokens=labels) for labels in (0, 300, 150))
    a_label = 6 * shape.vocabulary  # its logits in bf16 and again in fp32
    assert half - quarter == pytest.approx(150 * a_label, rel=0.02)
    assert at_once - half > 300 * a_label


def _small(
    language_model: dict[str, Any] | None = None,
    *,
    tower: dict[str, Any] | None = None,
    freeze: Sequence[str] = ("tower",),
    rows: int = 2,
    precision: str = "bf16",
) -> RunConfig:
    config = load_run_file(ROOT / "configs/digits.yaml")
    parts = {"tower": tower or {}, "language_model": {"num_hidden_layers": 3, **(language_model or {})}}
    changed = {name: getattr(config.model, name) for name in parts}
    changed = {
        name: part.model_copy(update={"config": {**part.config, **parts[name]}}) for name, part in changed.items()
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={**changed, "freeze": tuple(freeze)}),
            "features": config.features.model_copy(update={"cache": "off"}),
            "train": config.train.model_copy(update={"micro_batch_size": rows, "precision": precision}),
            "data": config.data.model_copy(update={"sequence_length": 512}),
        }
    )
