"""Traffic of each strategy: the laws that any layout keeps, and what known layouts send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner.configs import LLAVA_7B
from vlmpipe.planner.parallel_layout import STRATEGIES, Layout, make_layout
from vlmpipe.planner.time.communication import Work, pipeline_bubble, traffic
from vlmpipe.planner.time.transfers import Transfer

TRAINABLE = LLAVA_7B.trainable_parameters
WORK = Work(micro_steps=4, micro_batch_size=1, sequence_length=4096, precision="bf16", activation_checkpointing="full")
NODES, RANKS = st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])
STRATEGY = st.sampled_from(sorted(STRATEGIES))


def layout(strategy: str, nodes: int, ranks_per_node: int) -> Layout:
    """The strategy with model parallelism of two where it has any, as far as the ranks allow."""
    pair = 2 if nodes * ranks_per_node >= 4 else 1
    tensor = pair if strategy in ("tp", "tp+pp+dp") else 1
    pipeline = pair if strategy in ("pp", "tp+pp+dp") else 1
    return make_layout(strategy, nodes, ranks_per_node, tensor_parallel=tensor, pipeline_parallel=pipeline)


def sent(strategy: str, nodes: int, ranks_per_node: int, **work: Any) -> tuple[Transfer, ...]:
    return traffic(layout(strategy, nodes, ranks_per_node), LLAVA_7B, replace(WORK, **work))


def bytes_between_nodes(strategy: str, nodes: int, ranks_per_node: int) -> float:
    """Sent by one node's network card in a step."""
    return sum(transfer.bytes_per_nic for transfer in sent(strategy, nodes, ranks_per_node))


@given(STRATEGY, NODES, RANKS, st.sampled_from(["fp32", "bf16"]), st.integers(1, 16))
def test_traffic_is_never_negative(strategy: str, nodes: int, ranks: int, precision: Any, micro_steps: int) -> None:
    for transfer in sent(strategy, nodes, ranks, precision=precision, micro_steps=micro_steps):
        assert transfer.bytes_per_rank > 0
        assert transfer.bytes_per_nic >= 0


@given(STRATEGY, RANKS)
def test_one_node_sends_nothing_to_others(strategy: str, ranks: int) -> None:
    assert bytes_between_nodes(strategy, 1, ranks) == 0


@given(STRATEGY)
def test_one_rank_sends_nothing(strategy: str) -> None:
    assert not sent(strategy, 1, 1)


@given(NODES, RANKS)
def test_compressed_gradients_are_half_the_bytes(nodes: int, ranks: int) -> None:
    plain, half = (sum(t.bytes_per_rank for t in sent("ddp", nodes, ranks, rounds_gradients=rounded))
                   for rounded in (False, True))  # fmt: skip
    assert plain == 2 * half


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"])
def test_with_bf16_weights_a_weight_is_two_bytes_and_a_gradient_as_asked(strategy: str) -> None:
    def payloads(**work: Any) -> dict[str, float]:
        return {t.what: t.payload_bytes for t in sent(strategy, 1, 8, **work)}

    fp32, bf16 = payloads(precision="fp32"), payloads(bf16_weights=True)
    assert bf16["gradients"] == fp32["gradients"]
    assert payloads(bf16_weights=True, reduce_bytes=2)["gradients"] == bf16["gradients"] / 2
    assert "weights" not in fp32 or bf16["weights"] == fp32["weights"] / 2


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8]), st.integers(1, 8))
def test_with_hpz_trained_weights_leave_a_node_once_a_step_and_frozen_ones_never(
    nodes: int, ranks: int, micro_steps: int
) -> None:
    work = replace(WORK, micro_steps=micro_steps)
    plain, copied = (
        [
            t
            for t in traffic(make_layout("zero3", nodes, ranks, copy_ranks=copies), LLAVA_7B, work)
            if t.what == "weights"
        ]
        for copies in (0, ranks)
    )
    between = [t.payload_bytes for t in copied if t.scope == "inter"]
    assert between == [2 * TRAINABLE]  # in bf16
    for_all, inside = (sum(t.payload_bytes for t in each if t.scope == "intra") for each in (plain, copied))
    assert inside == pytest.approx(for_all)


@given(STRATEGY, st.sampled_from([2, 4, 8]), RANKS)
def test_traffic_between_nodes_needs_network_cards(strategy: str, nodes: int, ranks: int) -> None:
    for transfer in sent(strategy, nodes, ranks):
        assert (transfer.bytes_per_nic > 0) == (transfer.scope == "inter")


@given(STRATEGY, st.sampled_from([1, 2, 4]), st.sampled_from([4, 8]))
def test_more_nodes_never_send_less_per_network_card(strategy: str, nodes: int, ranks: int) -> None:
    assert bytes_between_nodes(strategy, nodes, ranks) <= bytes_between_nodes(strategy, 2 * nodes, ranks)


@given(st.sampled_from([2, 3, 4, 8]), RANKS)
def test_reduce_scatter_and_all_gather_are_an_all_reduce(nodes: int, ranks: int) -> None:
    """FSDP's fp32 gradients one way and ZeRO's fp32 weights the other, against DDP's all-reduce of the same bytes."""
    fsdp = [t for t in sent("fsdp", nodes, ranks, micro_steps=1) if t.collective == "reduce_scatter"]
    zero = [t for t in sent("zero2", nodes, ranks) if t.collective == "all_gather"]
    ddp = sent("ddp", nodes, ranks)
    for scope in ("intra", "inter"):
        halves = sum(t.bytes_per_rank for t in (*fsdp, *zero) if t.scope == scope)
        assert halves == pytest.approx(sum(t.bytes_per_rank for t in ddp if t.scope == scope))


@given(st.sampled_from([2, 3, 4, 8]), RANKS)
def test_each_rank_of_a_hybrid_takes_one_shard_of_the_gradients_across_nodes(nodes: int, ranks: int) -> None:
    """The rings of a node's ranks share its card, which so carries what it carries for DDP."""
    (hybrid,) = [t for t in sent("hsdp", nodes, ranks, micro_steps=1) if t.scope == "inter"]
    (ddp,) = [t for t in sent("ddp", nodes, ranks) if t.scope == "inter"]
    assert hybrid.collective == ddp.collective == "all_reduce"
    assert hybrid.payload_bytes == pytest.approx(ddp.payload_bytes / ranks)
    assert hybrid.bytes_per_nic == pytest.approx(ddp.bytes_per_nic)


def test_ddp_sends_fp32_gradients_once_a_step() -> None:
    intra, inter = sent("ddp", 4, 8)
    assert intra.bytes_per_rank == pytest.approx(2 * 7 / 8 * 4 * TRAINABLE)
    assert inter.bytes_per_nic == pytest.approx(2 * 3 / 4 * 4 * TRAINABLE)
    assert sent("ddp", 4, 8, micro_steps=1) == (intra, inter)


def test_zero2_reduces_after_each_micro_batch_in_the_autocast_type() -> None:
    embedding = LLAVA_7B.parameters["embedding"]
    reduced = next(t for t in sent("zero2", 2, 8) if t.what == "gradients")
    assert reduced.payload_bytes == 4 * (2 * (TRAINABLE - embedding) + 4 * embedding)
    gathered = next(t for t in sent("zero2", 2, 8) if t.what == "weights")
    assert gathered.payload_bytes == 4 * TRAINABLE


def test_fsdp_gathers_layers_twice_and_reduces_once_a_micro_batch() -> None:
    layers = LLAVA_7B.parameters["language_layers"]
    gathered = next(t for t in sent("fsdp", 2, 8) if t.what == "weights")
    reduced = next(t for t in sent("fsdp", 2, 8) if t.what == "gradients")
    assert gathered.payload_bytes == 4 * 2 * (TRAINABLE + layers)
    assert reduced.payload_bytes == 4 * 4 * TRAINABLE
    assert reduced.collective == "reduce_scatter"


def test_frozen_parts_are_not_sent() -> None:
    projector_only = replace(LLAVA_7B, frozen=frozenset({"tower", "embedding", "language_layers", "head"}))
    for strategy in STRATEGIES:
        for transfer in traffic(make_layout(strategy, 2, 8), projector_only, WORK):
            if (strategy, transfer.what) != ("zero3", "weights"):  # it shards frozen ones too, so they are gathered
                assert transfer.payload_bytes <= 4 * 4 * LLAVA_7B.parameters["projector"]


def test_tensor_parallel_neighbours_share_a_node() -> None:
    whole = make_layout("tp", 2, 8, tensor_parallel=8)
    activations = [t for t in traffic(whole, LLAVA_7B, WORK) if t.what == "activations"]
    assert [t.scope for t in activations] == ["intra"]
    # In each layer two sums forward, one again and two backward; the embedding; in bf16; four micro-batches.
    assert activations[0].payload_bytes == 2 * (5 * 32 + 1) * 4096 * 4096 * 4


@given(st.sampled_from([2, 4, 8]), st.sampled_from(["none", "full"]))
def test_sequence_parallelism_sends_as_much_as_its_all_reduces(ranks: int, checkpointing: Any) -> None:
    """But for both ends of the stack, and what attention takes, which is gathered again where it is computed again."""
    whole = make_layout("tp", 1, ranks, tensor_parallel=ranks)
    work = replace(WORK, precision="fp32", activation_checkpointing=checkpointing)
    plain, shared = (
        sum(
            transfer.bytes_per_rank
            for transfer in traffic(whole, LLAVA_7B, replace(work, sequence_parallel=shares))
            if transfer.what == "activations"
        )
        for shares in (False, True)
    )
    numbers = work.micro_steps * work.sequence_length * LLAVA_7B.language.hidden
    more = 2 + (32 if checkpointing == "full" else 0)
    assert shared - plain == pytest.approx((ranks - 1) / ranks * numbers * more * 4)


def test_ranks_that_share_sequences_exchange_their_part_of_heads() -> None:
    """On one node each rank sends all but its own part; on two, half of what it has over the network."""
    work = replace(WORK, activation_checkpointing="full")
    one, two = (
        {
            t.scope: t
            for t in traffic(make_layout("fsdp", nodes, 8 // nodes, context_parallel=8), LLAVA_7B, work)
            if t.collective == "all_to_all"
        }
        for nodes in (1, 2)
    )
    # Queries, keys, values and outputs of 32 layers, forward, again and backward, in bf16.
    exchanged = 3 * 4 * 32 * 4096 * 2 * work.sequence_length * work.micro_batch_size * work.micro_steps / 8
    assert one["intra"].payload_bytes == two["intra"].payload_bytes == exchanged
    assert one["intra"].bytes_per_rank == pytest.approx(exchanged * 7 / 8) and "inter" not in one
    assert two["intra"].bytes_per_rank == pytest.approx(exchanged * 3 / 8)
    assert two["inter"].bytes_per_nic == pytest.approx(4 * exchanged * 4 / 8)


def test_sharing_sequences_leaves_the_traffic_of_gradients() -> None:
    """But for the micro-batches, of which each rank has more."""
    plain, shared = (
        [t for t in traffic(make_layout("fsdp", 1, 8, context_parallel=n), LLAVA_7B, WORK) if t.what != "activations"]
        for n in (1, 4)
    )
    assert plain == shared


@given(st.sampled_from(["pp", "tp+pp+dp"]), st.integers(1, 8))
def test_stages_gather_and_reduce_once_a_step(strategy: str, micro_steps: int) -> None:
    """However many micro-batches it has."""
    found = {t.name: t for t in sent(strategy, 2, 8, micro_steps=micro_steps) if t.what != "activations"}
    of_one = {t.name: t for t in sent(strategy, 2, 8, micro_steps=1) if t.what != "activations"}
    assert found == of_one
    gathered, reduced = found["all-gather of weights"], found["reduce-scatter of gradients"]
    # bf16 and fp32 of what is trained.
    assert 2 * gathered.payload_bytes == pytest.approx(reduced.payload_bytes)


def test_stages_on_several_nodes_send_over_the_network() -> None:
    apart = make_layout("pp", 2, 8, pipeline_parallel=2)
    together = make_layout("pp", 1, 8, pipeline_parallel=2)
    scopes = [{t.scope for t in traffic(each, LLAVA_7B, WORK) if t.collective == "send"} for each in (apart, together)]
    assert scopes == [{"inter"}, {"intra"}]


@given(STRATEGY, st.sampled_from([2, 4, 8]))
def test_more_micro_batches_never_start_fewer_collectives(strategy: str, nodes: int) -> None:
    one, four = (sum(t.calls for t in sent(strategy, nodes, 8, micro_steps=steps)) for steps in (1, 4))
    assert 1 <= one <= four


@pytest.mark.parametrize(
    ("ranks", "virtual", "micro_steps", "bubble"), [(4, 1, 1, 0.75), (4, 1, 9, 0.25), (2, 1, 1, 0.5), (4, 3, 3, 0.25)]
)
def test_pipeline_bubble(ranks: int, virtual: int, micro_steps: int, bubble: float) -> None:
    layout = make_layout("pp", 1, ranks, pipeline_parallel=ranks, virtual_stages=virtual)
    assert pipeline_bubble(layout, micro_steps) == bubble


@pytest.mark.parametrize(("ranks", "virtual", "sends"), [(2, 1, 1), (2, 2, 3), (4, 1, 2), (4, 2, 4)])
def test_interleaved_stages_send_more(ranks: int, virtual: int, sends: int) -> None:
    """Of the rank that sends most, in each micro-batch."""
    layout = make_layout("pp", 1, ranks, pipeline_parallel=ranks, virtual_stages=virtual)
    (found,) = [t for t in traffic(layout, LLAVA_7B, WORK) if t.collective == "send"]
    hidden_bytes = WORK.micro_batch_size * WORK.sequence_length * LLAVA_7B.language.hidden * 2  # bf16
    assert found.payload_bytes == sends * hidden_bytes * max(WORK.micro_steps, ranks)
