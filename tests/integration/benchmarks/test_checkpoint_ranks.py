"""Requests and bytes of a checkpoint by its number of ranks, by the simulation that `make bench-checkpoint` prints."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.scale.checkpoint_ranks import KEEP, NODE_RANKS, PAGE, Simulation
from vlmpipe.planner.cost.requests import KEPT_READS, MANIFEST_READS, RANK_FILES, SAVE_LISTS, SAVE_WRITES
from vlmpipe.trainer.checkpoint.manifest import MAX_BLOCKS, MAX_SAVE_BLOCKS, MIN_BLOCK_BYTES, block_bytes_of
from vlmpipe.trainer.checkpoint.verified_files import total_bytes, union

SAVES = KEEP + 1
SMALL_REQUESTS = 40  # of listing, COMMITs, notes and starts, whatever the number of ranks


@pytest.fixture(scope="module", params=(8, 64, pytest.param(1024, marks=pytest.mark.slow)))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    with Simulation.of(tmp_path_factory.mktemp("ranks"), request.param, tensors=1) as run:
        for step in range(1, SAVES):
            run.save(step)
        yield run


def test_a_save_takes_requests_in_proportion_to_its_ranks(run: Simulation) -> None:
    uploads, committed, cleared = run.save(SAVES)
    assert uploads.total == 2 * run.ranks + run.nodes + 1, "two files a rank, a manifest a node, and what is where"
    assert committed.total == run.nodes + 2, "each manifest, the number of starts and COMMIT"
    assert committed.depth == 3, "manifests are read side by side"
    assert cleared.kinds["delete"] == uploads.total + 1, "the files of one save, and COMMIT"
    pages = -(-uploads.total // PAGE)
    assert cleared.kinds["list"] <= 3 + pages, "of the saves that are kept no file is listed"
    assert cleared.total - cleared.kinds["delete"] - pages <= SMALL_REQUESTS


def test_a_save_takes_the_requests_that_plan_counts(run: Simulation) -> None:
    """Of a rank's files the simulation has two: the state of a GPU's generator is missing."""
    kinds = sum((part.kinds for part in run.save(SAVES + 1)), Counter[str]())
    writes, reads = kinds["write"] + kinds["list"], kinds["read"] + kinds["stat"]
    pages = run.ranks * RANK_FILES // PAGE
    assert writes == pytest.approx((RANK_FILES - 1) * run.ranks + run.nodes + SAVE_WRITES + SAVE_LISTS, abs=2 + pages)
    assert reads == pytest.approx(MANIFEST_READS * run.nodes + KEPT_READS * (KEEP + 1), abs=8)


def test_a_resume_knows_all_files_after_three_requests_in_a_row(run: Simulation) -> None:
    _, asked = run.find()
    assert asked.depth == 3, "folders, their COMMITs, the manifests of one"
    assert asked.kinds["list"] == 1, "no file is listed"
    assert asked.total <= run.nodes + SMALL_REQUESTS


@pytest.mark.parametrize("share", [1, 2])
def test_a_node_reads_what_its_ranks_load_and_each_byte_once(run: Simulation, share: int) -> None:
    files, _ = run.find()
    metadata, described = run.described(files)
    assert described.total == 1
    ranks = run.ranks // share
    parts = [run.reads(files, metadata, ranks, rank) for rank in range(min(NODE_RANKS, ranks))]
    fetched, loaded = run.fetch(files, union(parts)), total_bytes(union(parts))
    state = share * run.rank_bytes * len(parts)
    random_states = files.sizes_bytes["rng-0.pt"] * len(parts) if ranks == run.ranks else 0
    assert loaded == state + random_states, "no rank reads what it does not load"
    read_files = (share + (ranks == run.ranks)) * len(parts)
    assert fetched.total == read_files
    assert fetched.read_bytes <= loaded + read_files * 2 * MIN_BLOCK_BYTES
    # Each rank tells all others its ranges: what it tells must not grow with the ranks or with the state.
    assert max(len(pickle.dumps(part)) for part in parts) <= 60 * (share + 1)


@pytest.mark.parametrize("ranks", [1, 8, 32, 64, 1024, 1 << 21])
@pytest.mark.parametrize("size_bytes", [1, 10**6, 10**9, 10**11])
def test_digests_of_a_save_stay_small_on_any_number_of_ranks(ranks: int, size_bytes: int) -> None:
    block_bytes = block_bytes_of(size_bytes, ranks)
    blocks = -(-size_bytes // block_bytes)
    assert blocks <= max(1, min(MAX_BLOCKS, MAX_SAVE_BLOCKS // ranks))
    assert block_bytes % MIN_BLOCK_BYTES == 0
    assert ranks > 32 or block_bytes == block_bytes_of(size_bytes), "up to 32 ranks files have as many as one"
