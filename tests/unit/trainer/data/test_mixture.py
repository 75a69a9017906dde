"""Draws from several sources: exact shares, each source in passes, one pure function."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.paths import ROOT
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.mixture import Mixture, alternating, described_passes, weighted_draws
from vlmpipe.trainer.data.packing import plan_packing
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.errors import DataError

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)
NAMES = "abcde"


def data(*sources: dict[str, Any], **fields: Any) -> DataConfig:
    named = [{"name": name, "uri": f"{name}.json"} | source for name, source in zip(NAMES, sources, strict=False)]
    return DataConfig.model_validate({"sources": named, "sequence_length": 100, **fields})


class Split:
    """A split whose samples lie in shards as preparation writes them: one source after the other."""

    name = "train"

    def __init__(self, sizes: list[int]) -> None:
        self.ids = [f"{name}/{n:04}" for name, size in zip(NAMES, sizes, strict=False) for n in range(size)]
        self.shard_numbers = np.arange(len(self)) // 7
        self.tokens, self.label_tokens = np.arange(len(self)) % 60 + 5, np.ones(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def shown(self) -> Any:
        return np.zeros(len(self), np.int64)


def split(sizes: list[int]) -> Any:
    return Split(sizes)


def source_of(sizes: list[int], drawn: np.ndarray[Any, Any]) -> list[int]:
    return np.searchsorted(np.cumsum(sizes), drawn, side="right").tolist()


@given(st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any), st.data())
def test_every_stretch_has_the_shares(draws: list[int], choose: st.DataObject) -> None:
    order = alternating(draws)
    assert sorted(order.tolist()) == list(range(sum(draws)))
    kinds = np.searchsorted(np.cumsum(draws), order, side="right")
    start = choose.draw(st.integers(0, len(order)))
    stop = choose.draw(st.integers(start, len(order)))
    for kind, count in enumerate(draws):
        share = count / sum(draws)
        found = int((kinds[start:stop] == kind).sum())
        assert abs(found - share * (stop - start)) <= 1 + share * len(draws) + 1e-9


@given(SIZES, st.data())
def test_each_source_is_read_in_whole_passes_over_all_epochs(sizes: list[int], choose: st.DataObject) -> None:
    samples = [choose.draw(st.integers(1, 3 * size)) for size in sizes]
    mixture = Mixture(split(sizes), data(*({"samples": count} for count in samples[: len(sizes)])), seed=3)
    drawn = np.concatenate([mixture.drawn(epoch) for epoch in range(4)])
    for number, (size, count) in enumerate(zip(sizes, samples, strict=True)):
        of_source = [sample for sample, source in zip(drawn.tolist(), source_of(sizes, drawn), strict=True)
                     if source == number]  # fmt: skip
        assert len(of_source) == 4 * count
        passes = [of_source[start : start + size] for start in range(0, len(of_source), size)]
        assert all(len(set(one)) == len(one) for one in passes), "a sample twice before all others came"
    assert mixture.drawn(2).tolist() == Mixture(split(sizes), mixture._data, seed=3).drawn(2).tolist()


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    made = [Mixture(split([50]), data({}), seed=seed).drawn(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(left != right for left, right in pairwise(made))


@pytest.mark.parametrize(
    ("sizes", "weights", "repeat", "draws"),
    [
        ([100, 50], [1, 1], False, [50, 50]),
        ([100, 50], [1, 1], True, [100, 100]),
        ([100, 50, 7], [3, 1, 0], False, [100, 33, 0]),
        ([100, 50, 7], [3, 1, 0], True, [150, 50, 0]),
        ([100, 10**6], [0.999, 0.001], False, [100, 1]),  # a small weight is never none at all
    ],
)
def test_weights_and_the_end_of_an_epoch(
    sizes: list[int], weights: list[float], repeat: bool, draws: list[int]
) -> None:
    assert weighted_draws(sizes, weights, repeat=repeat) == draws


def test_epochs_and_samples_of_a_source() -> None:
    mixture = Mixture(split([40, 30, 20]), data({"epochs": 0.5}, {"samples": 70}, {}), seed=0)
    assert mixture.draws(0) == mixture.draws(5) == [20, 70, 20]


def test_a_curriculum_changes_the_weights_and_goes_on_in_each_source() -> None:
    phases = [{"epochs": 2, "weights": {"a": 1.0}}, {"weights": {"a": 0.5, "b": 0.5}}]
    mixture = Mixture(split([10, 8]), data({}, {}, phases=phases), seed=0)
    assert [mixture.draws(epoch) for epoch in range(4)] == [[10, 0], [10, 0], [10, 10], [10, 10]]
    from_b = [sample for epoch in (2, 3) for sample in mixture.drawn(epoch).tolist() if sample >= 10]
    assert len(set(from_b[:8])) == 8 and len(set(from_b[8:16])) == 8, "the second pass begins within an epoch"


def test_a_window_of_packed_sequences_keeps_the_shares() -> None:
    sizes = [300, 100]
    drawn = Mixture(split(sizes), data({"weight": 0.5}, {"weight": 0.5}), seed=0).drawn(0)
    lengths = np.random.default_rng(0).integers(5, 60, sum(sizes))
    options: dict[str, Any] = {"sequence_length": 100, "max_images_per_sequence": 9, "seed": 0, "epoch": 0}
    made = plan_packing(lengths, np.zeros_like(lengths), **options, window=40, drawn=drawn)
    assert sorted(made.members.tolist()) == sorted(drawn.tolist())
    for start in range(0, len(drawn), 40):
        of_first = source_of(sizes, made.members[start : start + 40]).count(0)
        assert abs(of_first - 20) <= 2


def test_a_run_that_resumes_anywhere_reads_on_as_one_that_never_stopped() -> None:
    made = split([50, 20])
    settings = data({"weight": 0.5}, {"weight": 0.5})

    def sequence() -> PackedBatchSampler:
        return PackedBatchSampler(made, settings, seed=1, global_batch_size=4, mixture=Mixture(made, settings, seed=1))

    whole, consumed = sequence(), 0
    for step in range(3 * whole.num_steps(1)):
        batch = whole.batch(step)
        assert sequence().batch_at(consumed) == batch
        assert sequence().members(batch).tolist() == whole.members(batch).tolist()
        consumed += len(batch)


@pytest.mark.parametrize("other", [[49, 21], [20, 50]])
def test_sources_of_other_sizes_do_not_share_a_plan(
    other: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their samples have the same lengths, so only the sources tell them apart."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
    settings = data({"weight": 0.5}, {"weight": 0.5})
    for sizes in ([50, 20], other):
        made = split(sizes)
        of_memory, shared = (
            PackedBatchSampler(
                made,
                settings,
                seed=1,
                global_batch_size=4,
                mixture=Mixture(made, settings, seed=1),
                share_from=share_from,
            )
            for share_from in (None, 1)
        )
        assert shared.plan(1).digest() == of_memory.plan(1).digest()
        assert shared.num_steps(3) == of_memory.num_steps(3)


def test_the_guides_examples_are_valid() -> None:
    page = (ROOT / "docs/how-to/bring-your-own-data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    contents = [{"sequence_length": 1024, **yaml.safe_load(block)["data"]} for block in blocks]
    assert len([DataConfig.model_validate(content) for content in contents if "sources" in content]) == 3


A, B = {"name": "a", "uri": "a.json"}, {"name": "b", "uri": "b.json"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has no source: expected one of the two"),
        ({"source": "x.json", "sources": [A]}, "has source and sources"),
        ({"sources": [A, A]}, "two sources of one name"),
        ({"sources": [A | {"weight": 1}, B]}, "and b without: expected a weight for all"),
        ({"sources": [A | {"weight": 0}, B | {"weight": 0}]}, "weights that sum to nothing"),
        ({"sources": [A | {"weight": 1, "epochs": 2}]}, "has weight and epochs: expected one of"),
        ({"sources": [A], "max_samples": 3}, "max_samples next to sources: set it in each source"),
        ({"sources": [A], "phases": [{"weights": {"c": 1}}]}, "a phase with a weight for c: expected the sources a"),
        ({"sources": [A], "phases": [{"weights": {"a": 0}}]}, "a phase whose weights sum to nothing"),
        ({"sources": [A | {"weight": 1}], "phases": [{"weights": {"a": 1}}]}, "a weight or number of its own, a"),
        ({"source": "x.json", "phases": [{"weights": {"a": 1}}]}, "phases without sources"),
        ({"sources": [A | {"uri": "builtin:digits"}], "split_by": "patient"}, "which builtin:digits has none of"),
        ({"sources": [A | {"name": "a/b"}]}, "should match pattern"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DataConfig.model_validate({"sequence_length": 100, **fields})


def two_sources(**data: Any) -> DataConfig:
    sources = [{"name": "small", "uri": "a.jsonl"}, {"name": "large", "uri": "b.jsonl"}]
    weights = data.pop("weights", None)
    if weights:
        sources = [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)]
    return DataConfig.model_validate({"sources": sources, "sequence_length": 10} | data)


def test_passes_of_each_source_are_told_warned_about_and_bounded() -> None:
    assert described_passes(two_sources(weights=[0.1, 0.9]), [100, 900]) == "passes an epoch: small 1, large 1"
    assert "small 30, large 1 (more than 10 of small" in described_passes(two_sources(weights=[0.5, 0.5]), [30, 900])
    extreme = two_sources(weights=[0.99, 0.01])
    with pytest.raises(DataError, match="an epoch reads small 9,900 times"):
        described_passes(extreme, [30, 3000])
    assert described_passes(extreme.model_copy(update={"stopping_strategy": "first_exhausted"}), [30, 3000])
    assert described_passes(extreme.model_copy(update={"max_source_passes": 10_000.0}), [30, 3000])


def test_the_phase_with_the_most_passes_counts() -> None:
    phases = [{"epochs": 1, "weights": {"small": 1, "large": 1}}, {"weights": {"small": 40, "large": 1}}]
    with pytest.raises(DataError, match="an epoch reads small 4,000 times"):
        described_passes(two_sources(phases=phases), [10, 1000])
