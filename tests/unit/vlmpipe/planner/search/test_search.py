"""What `vlmpipe plan --suggest` chooses from is what the trainer accepts."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.planner.configs import run_config
from tests.support.trainer.runs import merged
from tests.support.trainer.tiny_native import model_section
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.cli.views.suggestions import print_suggestions
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, load_run_file, parse_run_config
from vlmpipe.planner.model_architecture import Architecture, architecture
from vlmpipe.planner.parallel_layout import more_context_parallel
from vlmpipe.planner.plan import plan_basis
from vlmpipe.planner.search import ways
from vlmpipe.planner.search.memory import SearchMemory
from vlmpipe.planner.search.search import Suggestions
from vlmpipe.planner.search.space import Cluster, Degrees, candidates, clusters, node_counts
from vlmpipe.planner.search.ways import Goal, Suggestion, less_memory
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.trainer.config.model import GRID_FAMILIES

MACHINE = load_catalog().machines["a2-ultragpu-8g"]
GPU = load_catalog().gpus["NVIDIA_A100_80GB"]
PLACES = [Cluster(MACHINE, GPU, gpus, nodes) for gpus in (1, 8) for nodes in (1, 4)]
LANGUAGE = "model.language_model.config"


def run_file(**language: Any) -> RunConfig:
    """Twelve heads and six key-value heads in seven layers; `language` replaces sizes."""
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6, "num_hidden_layers": 7, **language}
    base = load_run_file(ROOT / "configs/digits.yaml").to_dict()
    changes = {f"{LANGUAGE}.{name}": value for name, value in sizes.items()}
    changes |= {"train.global_batch_size": 64, "model.tower.config.num_attention_heads": 4}
    return parse_run_config(merged(base, changes), "test")


@pytest.mark.parametrize(
    ("language", "cached", "tensor"),
    [
        ({}, True, {2}),  # of the divisors of 8 GPUs: 4 does not divide 6 key-value heads
        pytest.param({"num_key_value_heads": 12}, True, {2, 4}, marks=pytest.mark.slow),
        pytest.param({"num_attention_heads": 24, "num_key_value_heads": 24}, True, {2, 4, 8}, marks=pytest.mark.slow),
        ({"num_attention_heads": 24, "num_key_value_heads": 24}, False, {2, 4}),  # the tower that runs has 4 heads
        ({"num_key_value_heads": 12, "intermediate_size": 190}, True, {2}),
        ({"num_key_value_heads": 1}, True, set()),
    ],
)
def test_tensor_parallel_degrees_divide_heads_and_width(
    language: dict[str, Any], cached: bool, tensor: set[int]
) -> None:
    degrees = Degrees.of(architecture(run_file(**language)), PLACES, cached=cached)
    assert degrees.tensor == tensor


def test_a_stack_of_seven_layers_has_at_most_seven_stages() -> None:
    assert Degrees.of(architecture(run_file()), PLACES, cached=True).pipeline == {2, 4}


def test_adapters_are_split_with_their_layers() -> None:
    config = run_file()
    with_adapters = parse_run_config(merged(config.to_dict(), {"model.lora": {"rank": 4}}), "test")
    assert Degrees.of(architecture(with_adapters), PLACES, cached=True).tensor == {2}


@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_native_models_support_tensor_and_pipeline_parallelism(family: str) -> None:
    """Two key-value heads, two layers: of the divisors of 8 GPUs, two ranks take each."""
    assert Degrees.of(native(family), PLACES, cached=False) == Degrees(frozenset({2}), frozenset({2}))


def test_deepstack_layers_count_as_one_layer_of_a_pipeline() -> None:
    """DeepStack adds to the first two of four."""
    levels = {"vision_config.depth": 3, "vision_config.deepstack_visual_indexes": [0, 1]}
    model = native("qwen3_vl", {"text_config.num_hidden_layers": 4, **levels})
    assert Degrees.of(model, PLACES, cached=False).pipeline == {2}


def native(family: str, changes: dict[str, Any] | None = None) -> Architecture:
    content = load_run_file(ROOT / "configs/digits.yaml").to_dict() | {"model": model_section(family)}
    inside = {f"model.pretrained.config.{name}": value for name, value in (changes or {}).items()}
    return architecture(parse_run_config(merged(content, inside), "test"))


SHARED_TOKENS = {"train.strategy": "tp", "train.tensor_parallel": 2, "train.sequence_parallel": True}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param({"train.strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"train.strategy": "zero1", "train.offload": "optimizer"}, marks=pytest.mark.slow),
        {"train.strategy": "zero3", "train.deepspeed.zero_optimization.zero_hpz_partition_size": 8},
        {"train.strategy": "fsdp", "train.reshard_after_forward": "never", "train.prefetch_layers": 2},
        {"train.strategy": "ddp", "train.context_parallel": 2, "cluster.processes_per_replica": 2},
        {
            **SHARED_TOKENS,
            "cluster.processes_per_replica": 2,
            "data.sequence_length": 508,
        },  # which 8 ranks cannot share
    ],
)
def test_every_candidate_is_a_valid_run_file(start: dict[str, Any]) -> None:
    """Also where the run file asks for what another strategy does not have."""
    base = parse_run_config(merged(run_file().to_dict(), start), "test")
    degrees = Degrees(tensor=frozenset({2, 4, 8}), pipeline=frozenset({2, 4}))
    found = set()
    for place in PLACES:
        for change in candidates(base, place, degrees):
            content = apply_overrides(base.to_dict(), place.change(base) | change)
            train = parse_run_config(content, "a way").train
            found.add((train.strategy, train.tensor_parallel, train.pipeline_parallel))
    assert {("tp", tensor, 1) for tensor in (2, 4, 8)} <= found
    assert {("pp", 1, 2), ("pp", 1, 4), ("ddp", 1, 1), ("hsdp", 1, 1)} <= found
    both = {(tensor, stages) for strategy, tensor, stages in found if strategy == "tp+pp+dp"}
    assert both and {tensor for tensor, _ in both} <= {place.gpus_per_node for place in PLACES}


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, [2, 4]),  # of eight GPUs and twelve heads
        ({"train.context_parallel": 2}, [4]),
        ({"data.sequence_length": 254}, [2]),
        ({"train.strategy": "tp", "train.tensor_parallel": 2}, []),
    ],
)
def test_degrees_of_context_parallelism_divide_gpus_heads_and_tokens(
    changes: dict[str, Any], degrees: list[int]
) -> None:
    base = {"train.strategy": "fsdp", "cluster.processes_per_replica": 8}
    config = parse_run_config(merged(run_file().to_dict(), base | changes), "test")
    assert more_context_parallel(config, 12) == [{"train.context_parallel": degree} for degree in degrees]


@pytest.mark.parametrize("trains_tower", [False, True])
def test_a_search_shares_sequences_last(trains_tower: bool) -> None:
    train: dict[str, Any] = {"train.strategy": "fsdp", "train.micro_batch_size": 1, "cluster.processes_per_replica": 4}
    train |= {"model.freeze": [], "features.cache": "off"} if trains_tower else {}
    shape: Any = SimpleNamespace(trains_tower=trains_tower, language=SimpleNamespace(heads=12))
    tried = []
    while True:
        config = parse_run_config(merged(run_file().to_dict(), train), "test")
        change = less_memory(config, shape)
        if not change:
            break
        tried.append(change)
        train |= change
    of_tower = [True] if trains_tower else []
    assert [next(iter(change.values())) for change in tried] == ["selective", "full", *of_tower, 2, 4]


def test_the_printed_command_includes_the_given_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """But for what the suggestion changes: it is the way of the table that is planned then."""
    change = {"train.strategy": "fsdp", "train.micro_batch_size": 2}
    found = [Suggestion(change, "1 x a", "fsdp", 1.0, 2.0, 3.0, 0.4, 5.0, 6.0)]
    given = ["train.strategy=ddp", "features.cache=off"]
    print_suggestions(Suggestions(tuple(found), ()), Goal("cheapest"), run_file(), "run.yaml", given)
    command = "vlmpipe plan run.yaml features.cache=off train.strategy=fsdp train.micro_batch_size=2\n"
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("goal", "title"),
    [
        ("cheapest", "The cheapest ways to train "),
        ("fastest", "The fastest ways to train "),
        ("under:1500", r"The fastest ways to train \S+ for at most \$1,500 "),
        ("by:1", r"The cheapest ways to train \S+ within 1 h "),
    ],
)
def test_a_table_names_its_order(goal: str, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    way = Suggestion({"train.strategy": "fsdp"}, "1 x a", "fsdp", 1.0, 2.0, 3.0, 0.4, 5.0, 6.0)
    print_suggestions(Suggestions((way,), ("b: no price is known",)), Goal.parse(goal), run_file(), "run.yaml")
    assert re.match(title, capsys.readouterr().out.strip())


def test_the_table_begins_with_todays_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they do not fit, in 80 columns with whole names of machines; and says why they have no row."""
    way = Suggestion(
        {"train.strategy": "fsdp"},
        "16 x a3-highgpu-8g (8 GPUs)",
        "tp+pp+dp, frozen weights sharded, 2 ranks a layer, 1 sequence, selective checkpointing",
        *(141.0, 141.0, 3.0, 0.4, 105.0, 6000.0),
        hours_range=(100.0, 110.0),
        usd_range=(5000.0, 7000.0),
        start_min=7,
    )
    today = replace(way, change={}, machines="4 x a2-ultragpu-8g (8 GPUs)", usd=214.0, memory_gib=95.0, fits=False)
    monkeypatch.setattr("vlmpipe.runs.terminal.COLUMNS", 80)
    print_suggestions(Suggestions((way,), (), today), Goal("cheapest"), run_file(), "run.yaml")
    screen = capsys.readouterr().out
    lines = screen.splitlines()
    assert max(map(len, lines[:-4])) <= 80
    first, second = (
        next(n for n, line in enumerate(lines) if text in line) for text in ("4 x a2-ultragpu-8g", "16 x a3-highgpu-8g")
    )
    assert lines[first - 1].strip().startswith("today:") and first < second
    assert "$214" in lines[first - 1] and "fit" in screen
    print_suggestions(Suggestions((way,), (), None, "n1-standard-8 has no GPU"), Goal("cheapest"), run_file(), "x.yaml")
    assert "No row of today's settings: n1-standard-8 has no GPU." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("fits", [True, False])
def test_a_way_on_whose_machine_another_job_does_not_fit_is_left_out(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of that way would be red."""
    monkeypatch.setattr(ways, "memory_beside_training", lambda *_given, **_named: [SimpleNamespace(fits=fits)])
    config = load_run_file(ROOT / "configs/llava-7b.yaml")
    model, load, prices = plan_basis(config)
    cache = CacheAdvice("off", None, None, 0)
    searched = ways.Search(config, model, load, cache, prices, SearchMemory(model, load, cached=False))
    place = Cluster(MACHINE, GPU, 8, 1)
    way = ways.priced(searched, Goal("cheapest"), place, {}, config)
    assert way and bool(ways.suggestion(searched, way)) is fits


@pytest.mark.parametrize(("nodes", "most"), [(1, 16), (16, 16), (64, 64), (512, 512), (2000, 512)])
def test_as_many_nodes_are_compared_as_the_run_file_has(nodes: int, most: int) -> None:
    counts = node_counts(run_config(cluster__replica_count=nodes, train__global_batch_size=8 * nodes))
    assert counts[0] == 1 and counts[-1] == most
    assert all(after == 2 * before for before, after in itertools.pairwise(counts))


def test_4096_gpus_are_compared_with_few_candidates_more_than_64() -> None:
    """A candidate takes a third of a millisecond of CPU time: 15,000 are the 5 s that a search may take. The part
    `search` of `make bench-planner` measures it."""

    def count(nodes: int) -> int:
        base = load_run_file(ROOT / "configs/llava-7b.yaml").to_dict()
        changes = {"cluster.replica_count": nodes, "train.global_batch_size": 8192}
        config = parse_run_config(apply_overrides(base, changes), "test")
        model, _, prices = plan_basis(config)
        places = list(clusters(config, load_catalog(), prices))
        degrees = Degrees.of(model, places, cached=False)
        return sum(1 for place in places for _ in candidates(config, place, degrees))

    assert count(8) < count(64) < count(512) < 15_000
    assert count(512) < 2.5 * count(8)
