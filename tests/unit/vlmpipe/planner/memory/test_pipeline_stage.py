"""Memory of pipeline stages that FSDP shards over copies of the model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.pipeline_partition import StageWeights
from vlmpipe.planner.memory.pipeline_schedule import operations
from vlmpipe.planner.memory.pipeline_stage import _Rank, _Stage
from vlmpipe.planner.memory.rank import GIB, Memory
from vlmpipe.planner.memory.stage_state import StageGroups
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.trainer.sizing.pipeline_partition import Stage

LLAMA_70B = {
    "model.language_model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        }
    },
    "model.tower": {
        "config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
        }
    },
    "model.tokenizer": "train:128256",
}
EIGHT_NODES = {
    "cluster.replica_count": 8,
    "cluster.reduction_server": None,
    "train.strategy": "tp+pp+dp",
    "train.tensor_parallel": 8,
    "train.pipeline_parallel": 2,
    "train.sequence_parallel": True,
    "train.global_batch_size": 128,
}


def config_of(**changes: Any) -> RunConfig:
    fields = {**LLAMA_70B, **EIGHT_NODES, **{name.replace("__", "."): value for name, value in changes.items()}}
    return load_run_file(
        ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml",
        [f"{name}={json.dumps(value)}" for name, value in fields.items()],
    )


def memory(config: RunConfig) -> Memory:
    catalog = load_catalog()
    machine, gpu = catalog.machines[config.cluster.machine_type], catalog.gpus[config.cluster.accelerator_type]
    return estimate_memory(config, architecture(config), machine, gpu, nearest=False)


@pytest.mark.slow
def test_a_70b_on_64_a100_fits_at_8_tensor_ranks_2_stages_and_4_copies(tmp_path: Path) -> None:
    """With stored weights, which ranks read while they shard them. Random ones are built whole: no node has room."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B["model.language_model"]["config"]))
    found = memory(config_of(model__language_model={"weights": str(tmp_path)}))
    assert found.fits and found.total_bytes < 60 * GIB
    random = memory(config_of())
    assert random.total_bytes == found.total_bytes and random.start and not random.start.fits
    sizes = {part.name: part.bytes for part in found.parts}
    assert sizes["optimizer"] == 2 * sizes["weights"]
    assert sizes["whole gradients"] == pytest.approx(4 * sizes["weights"], rel=1e-6)  # over four copies
    assert sizes["gathered weights"] == pytest.approx(sizes["whole gradients"] / 2, rel=1e-6)  # bf16


@pytest.mark.slow
def test_zero3_holds_no_whole_model_at_the_start(tmp_path: Path) -> None:
    """As above; DeepSpeed alone would move the whole model, 130 GiB in bf16, to each A100 before it is partitioned."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B["model.language_model"]["config"]))
    changes: dict[str, Any] = {"train__strategy": "zero3", "train__tensor_parallel": 1, "train__pipeline_parallel": 1}
    changes |= {"train__sequence_parallel": False, "train__activation_checkpointing": "full"}
    found = memory(config_of(**changes, model__language_model={"weights": str(tmp_path)}))
    assert found.fits and found.start
    slices = next(part.bytes for part in found.start.parts if part.name == "masters at the start")
    assert slices == pytest.approx(8 * 4 * 70e9 / 64, rel=0.02)
    random = memory(config_of(**changes))
    assert random.total_bytes == found.total_bytes and random.start and not random.start.fits


@pytest.mark.slow
def test_one_copy_alone_does_not_hold_it() -> None:
    assert not memory(config_of(cluster__replica_count=2)).fits


def test_stages_add_up_to_the_model() -> None:
    few = LLAMA_70B["model.language_model"]["config"] | {"num_hidden_layers": 8}
    shape = architecture(config_of(model__language_model={"config": few})).shape
    stages = [Stage(range(3), True, False), Stage(range(3, 8), False, True)]
    found = [StageWeights.of(shape, stage, cached=False, tensor_parallel=1) for stage in stages]
    assert sum(each.trainable for each in found) == shape.trainable_parameters
    assert sum(each.trainable + each.frozen for each in found) == shape.total_parameters
    assert sum(each.sliced for each in found) == sum(shape.sliced.values())
    embedding = shape.parameters["embedding"]
    assert found[0].root == found[0].sliced_root == embedding + shape.parameters["projector"]
    assert found[1].root == pytest.approx(shape.parameters["head"], rel=1e-4)  # and the last norm


@given(st.integers(2, 9), st.data())
def test_a_rank_with_one_stage_holds_no_more_with_more_passes(ranks: int, data: st.DataObject) -> None:
    """Nor does a later rank with an equal stage hold more than an earlier one: searches weigh only the first."""
    sizes = st.integers(0, 100)
    forward, kept, backward = ({"language": data.draw(sizes)} for _ in range(3))
    stage = _Stage(Counter(forward), Counter(kept), Counter(backward), 0, 0)
    groups = StageGroups(*(data.draw(sizes) for _ in range(6)))

    def total(number: int, passes: int) -> int:
        return _Rank([stage], [groups], [2], list(operations(number, ranks, 1, passes))).total_bytes

    for number in range(ranks):
        few = total(number, ranks + 1)
        assert few == total(number, ranks + 2) == total(number, 4 * ranks)
        assert number == 0 or few <= total(number - 1, ranks + 1)
