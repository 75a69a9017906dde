"""What the planner says that strategies send, against what their collectives carry between two real copies."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.support.drivers.count_traffic import LABELS, MARK, MICRO_ROWS, MICRO_STEPS, OTHERS, ROW_TOKENS
from tests.support.short_form import chosen
from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.runs import run_ranks
from vlmpipe.planner.parallel_layout import make_layout
from vlmpipe.planner.time.communication import FP32_BYTES, Work, traffic
from vlmpipe.trainer.config.strategies import PIPELINE_PARALLEL, TENSOR_PARALLEL
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.registry import strategy_names

COPIES = 2
WORK = Work(
    MICRO_STEPS,
    MICRO_ROWS,
    ROW_TOKENS,
    precision="fp32",
    activation_checkpointing="none",
    max_images_per_sequence=1 / MICRO_ROWS,
    sequence_label_tokens=LABELS / MICRO_ROWS,
)
SENT_AS = {"reduce_scatter": "all_reduce"}  # on CPUs it is carried out so
STRATEGIES = chosen(dict.fromkeys(strategy_names()), lambda name: name in ("ddp", "fsdp", "tp", "pp"))
MORE = chosen(OTHERS, lambda name: name == "ddp context parallel")
SPLIT = {*TENSOR_PARALLEL, *PIPELINE_PARALLEL}  # two ranks for each copy of the model; of tp+pp+dp four, and one copy
NODES = {"zero3 node weights": 2, "zero3 after them": 2}  # the others are on one


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    names_by_ranks: dict[tuple[int, int], list[str]] = {}
    for name in (*STRATEGIES, *MORE):
        names_by_ranks.setdefault(_ranks(name), []).append(name)
    for (nodes, processes), names in names_by_ranks.items():
        arguments = ["--strategies", *names]
        printed = run_ranks("tests.support.drivers.count_traffic", arguments, processes=processes, nodes=nodes)
        line = next(line for line in printed.splitlines() if line.startswith(MARK))
        found |= json.loads(line.removeprefix(MARK))
    return found


def _ranks(name: str) -> tuple[int, int]:
    """Nodes, and ranks on each."""
    return NODES.get(name, 1), COPIES * (2 if OTHERS.get(name, (name,))[0] in SPLIT else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, *MORE])
def test_strategies_send_what_the_planner_says(name: str, counted: dict[str, dict[str, int]]) -> None:
    strategy, of_model, of_train = OTHERS.get(name, (name, {}, {}))
    config = model_config(**of_model)
    shape = family_of(config).shape(config)
    tensor, stages = (2 if strategy in names else 1 for names in (TENSOR_PARALLEL, PIPELINE_PARALLEL))
    of_work = dict(of_train)
    of_work.pop("prefetch_layers", None)  # the same bytes, earlier
    layout = make_layout(
        strategy,
        *_ranks(name),
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        context_parallel=of_work.pop("context_parallel", 1),
        copy_ranks=of_work.pop("deepspeed", {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 0),
    )
    transfers = traffic(layout, shape, dataclasses.replace(WORK, **of_work))
    assert transfers
    expected = {"all_reduce": 0.0, "all_gather": 0.0, "all_to_all": 0.0, "send": 0.0}
    for transfer in transfers:
        if transfer.scope == "inter":  # the same collective once more
            continue
        # A collective's input on each rank: all of the tensor that is reduced, or its own part of what is gathered.
        group = layout.ranks_per_node if transfer.of_node else layout.replicas
        parts = group if transfer.collective == "all_gather" else 1
        expected[SENT_AS.get(transfer.collective, transfer.collective)] += transfer.payload_bytes / FP32_BYTES / parts
    found = {kind: counted[name].get(kind, 0) for kind in expected}
    print(name, "planned", expected, "counted", found)
    # Norms and padding are not planned. ZeRO-3 gathers its vectors once a step and not for each pass, and what is live
    # of the last layers when the backward pass begins not again: of a model with so few layers, a share that is seen.
    # Biases are planned as whole, though tensor-parallel ranks split some: seen where Qwen's tiny layers are gathered.
    bound = 0.05 if strategy == "zero3" else 0.01 if "qwen" in name else 0.005
    assert found == pytest.approx(expected, rel=bound, abs=0)
    assert strategy != "zero3" or found["all_gather"] <= expected["all_gather"]
