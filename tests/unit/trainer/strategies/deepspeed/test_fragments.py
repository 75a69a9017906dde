"""Where the ranks' parts of parameters are, from the descriptions that DeepSpeed's optimizers keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vlmpipe.trainer.distributed import agreement
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.strategies.deepspeed.fragments import Fragment, agreed_updates, fragments_of, updates_of

MATRIX, VECTOR = (3, 5), (2,)


def of_rank_in_stage_3(rank: int, ranks: int) -> dict[str, Fragment]:
    shapes: dict[str, tuple[int, ...]] = {"matrix": MATRIX, "vector": VECTOR}
    positions, trained, offset = {}, dict[str, Any](), 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        trained[name] = SimpleNamespace(ds_id=name, ds_shape=torch.Size(shape), ds_numel=numel)
        positions[name] = (0, offset, -(-numel // ranks))
        offset += -(-numel // ranks)
    optimizer = SimpleNamespace(
        grad_position=positions,
        get_param_id=lambda parameter: parameter.ds_id,
        _get_param_partition_rank=lambda _: rank,
    )
    return fragments_of(optimizer, trained)


def test_slices_of_stage_3_cover_each_parameter_without_the_padding() -> None:
    for ranks in (1, 2, 3, 4, 7):
        found = [of_rank_in_stage_3(rank, ranks) for rank in range(ranks)]
        for name, shape in (("matrix", MATRIX), ("vector", VECTOR)):
            parts = [each[name] for each in found if name in each]
            covered = [number for part in parts for number in range(part.start, part.start + part.numel)]
            assert covered == list(range(torch.Size(shape).numel())), (ranks, name)


def test_a_rank_that_has_padding_alone_has_no_part() -> None:
    assert of_rank_in_stage_3(1, 4).keys() == {"matrix", "vector"}
    assert of_rank_in_stage_3(2, 4).keys() == {"matrix"}


def test_partitions_of_stages_1_and_2_cover_each_parameter_in_the_order_that_deepspeed_gave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = {"matrix": nn.Parameter(torch.zeros(MATRIX)), "vector": nn.Parameter(torch.zeros(VECTOR))}
    for ranks, size in ((1, 18), (2, 9), (3, 6)):
        covered: dict[str, list[int]] = {name: [] for name in trained}
        for rank in range(ranks):
            monkeypatch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
            optimizer = SimpleNamespace(
                round_robin_bit16_groups=[[trained["vector"], trained["matrix"]]],
                round_robin_bit16_offsets=[[0, 3]],  # a number of padding between them
                single_partition_of_fp32_groups=[torch.zeros(size)],
                real_dp_process_group=[None],
                grad_position={},  # with offloading
            )
            for name, part in fragments_of(optimizer, trained).items():
                covered[name] += range(part.start, part.start + part.numel)
                place = rank * size + part.offset - part.start  # of the parameter's first number
                assert place == {"vector": 0, "matrix": 3}[name]
        assert covered == {"matrix": list(range(15)), "vector": [0, 1]}, ranks


def test_a_part_of_a_partition_is_a_view_of_it() -> None:
    parameter: Any = nn.Parameter(torch.zeros(MATRIX))
    address = SimpleNamespace(start=4, numel=6)
    in_partition = SimpleNamespace(start=1, numel=6)
    parameter._hp_mapping = SimpleNamespace(
        lp_fragment_address=address, hp_fragment_address=in_partition, param_group_index=1
    )
    elsewhere: Any = nn.Parameter(torch.zeros(2))
    elsewhere._hp_mapping = None
    fragments = fragments_of(SimpleNamespace(), {"matrix": parameter, "elsewhere": elsewhere})
    assert fragments == {"matrix": Fragment(torch.Size(MATRIX), 4, 6, 1, 1)}
    partitions = [torch.zeros(0), torch.arange(8.0)]
    pieces = fragments["matrix"].of(partitions).pieces
    assert {tuple(place): piece.tolist() for place, piece in pieces.items()} == {
        (0, 4): [[1.0]],
        (1, 0): [[2.0, 3.0, 4.0, 5.0, 6.0]],
    }
    pieces[torch.Size((0, 4))].fill_(9)
    assert partitions[1][1] == 9


def test_numbers_of_updates_that_a_partition_cannot_keep_apart_are_refused() -> None:
    """One of them would be taken for all: AdamW would correct the moments of the others by a wrong number."""
    one, two = torch.Size(VECTOR), torch.Size((3,))
    fragments = {
        "a": Fragment(one, 0, 2, 0, 0), "b": Fragment(two, 0, 3, 0, 2), "experts.c": Fragment(two, 0, 3, 1, 0)
    }  # fmt: skip
    assert updates_of(fragments, {"a": 7.0, "b": 7.0, "experts.c": 5.0}) == {0: 7.0, 1: 5.0}
    with pytest.raises(ConfigError, match="has 7 updates of a and 5 of b") as refused:
        updates_of(fragments, {"a": 7.0, "b": 5.0, "experts.c": 5.0})
    assert "continue with the train.strategy that saved it" in refused.value.fix


def test_a_rank_refuses_numbers_of_updates_that_only_another_rank_cannot_keep_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for that rank in the next collective."""
    counts, size = {"a": 7.0, "b": 5.0}, torch.Size(VECTOR)
    of_other = {name: Fragment(size, 0, 2, 0, 2 * place) for place, name in enumerate(counts)}
    with pytest.raises(ConfigError) as refused:
        updates_of(of_other, counts)
    error = refused.value

    def gather(gathered: list[Any], own: object, **_: object) -> None:
        assert own is None
        gathered[:] = [own, (error.found, error.expected, error.fix, int(error.code), error.passes)]

    monkeypatch.setattr(agreement, "dist", SimpleNamespace(all_gather_object=gather))
    monkeypatch.setattr(agreement, "patient_group", lambda: None)
    worker: Any = SimpleNamespace(world_size=2)
    with pytest.raises(UserError, match="has 7 updates of a and 5 of b"):
        agreed_updates({"a": of_other["a"]}, counts, worker)
