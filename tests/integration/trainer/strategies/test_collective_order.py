"""Ranks ask for the same collectives in the same order, whatever their data: else they hang or add wrong numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section as hf_section
from tests.support.hf.publish import publish
from tests.support.short_form import PATIENCE, chosen
from tests.support.trainer.native_models import SIZES, picture
from tests.support.trainer.runs import encode_features, ends_of_ranks, losses, make_run, metrics, run_ranks
from tests.support.trainer.tiny_native import CONFIGS
from tests.support.trainer.tiny_native import model_section as native_section
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.planner.memory.activations import require_degree
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.evaluation.validation_loss import VALIDATION_LOSS

pytestmark = pytest.mark.timeout(600 * PATIENCE)  # the first test of some families trains them all
SAMPLES, BATCH, TOWER, ADAPTERS = 31, 4, {"model.freeze": []}, {"model.lora": {"rank": 4}}
EMBEDDING = {"model.freeze": ["tower"], "model.freeze_parameters": ["*embed_tokens*"]}
SPLIT = {"train.strategy": "tp", "train.tensor_parallel": 2}
STAGES = {"train.strategy": "pp", "train.pipeline_parallel": 2}
SHARED = {"train.strategy": "fsdp", "train.context_parallel": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"train.strategy": "ddp"},
    "ddp tower bf16": TOWER | {"train.strategy": "ddp", "train.precision": "bf16"},
    "ddp adapters bf16": ADAPTERS | {"train.strategy": "ddp", "train.precision": "bf16"},
    "fsdp": {"train.strategy": "fsdp"},
    "fsdp tower": TOWER | {"train.strategy": "fsdp"},
    "fsdp adapters": ADAPTERS | {"train.strategy": "fsdp"},
    "fsdp embedding": EMBEDDING | {"train.strategy": "fsdp"},
    "fsdp frozen shards": {"train.strategy": "fsdp", "train.shard_frozen_weights": True},
    "fsdp cached": {"train.strategy": "fsdp", "features.cache": "on"},
    "fsdp checkpointing": TOWER | {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
    "fsdp context": SHARED,
    "fsdp context tower": SHARED | TOWER,
    "hsdp tower": TOWER | {"train.strategy": "hsdp"},
    "hsdp adapters": ADAPTERS | {"train.strategy": "hsdp"},
    "tp": SPLIT,
    "tp tower": SPLIT | TOWER,
    "tp adapters": SPLIT | ADAPTERS,
    "pp": STAGES,
    "pp tower": STAGES | TOWER,
    "zero1 tower": TOWER | {"train.strategy": "zero1"},
    "zero2": {"train.strategy": "zero2"},
    "zero2 tower": TOWER | {"train.strategy": "zero2"},
    "zero3": {"train.strategy": "zero3"},
    "zero3 tower": TOWER | {"train.strategy": "zero3"},
    "zero3 adapters": ADAPTERS | {"train.strategy": "zero3"},
    "zero3 cached": {"train.strategy": "zero3", "features.cache": "on"},
}
# Two ranks that hold the model together, beside two others; hsdp shards it within a node and replicates it over nodes.
FOUR_RANKS = {name: 2 if name.startswith("hsdp") else 1 for name in SETTINGS if name.split()[0] in ("hsdp", "tp", "pp")}
FOUR_RANKS |= {name: 1 for name in SETTINGS if "context" in name}
PUBLISHED = "hf "  # begins the name of a type of family hf: some are native families too
FAMILIES = ("llava", *CONFIGS, *(PUBLISHED + model_type for model_type in INSTALLED))
# Settings of the short form by family. That parts without images have gradients too is tested of each native family in
# tests/integration/trainer/models/test_native_models.py.
SHORT = {
    "llava": ("fsdp embedding",),
    "qwen3_vl": ("zero3",),
    "hf gemma3": ("fsdp embedding",),
}
PLAIN = {"train.strategy": "ddp", "train.micro_batch_size": BATCH}
TOGETHER = 5  # families whose runs are trained in one process group
RELATIVE, RELATIVE_BF16 = 1e-5, 0.03  # the largest in bf16 was 0.024, of Gemma 4's adapters after six steps
POINT_TO_POINT = ("send", "recv_", "recv")


@dataclass(frozen=True)
class Refusal:
    """Settings, by words of their names, that the product refuses of some families. says: part of its error. way_out:
    what the error says to do, with which the setting is trained instead; None where it names another strategy."""

    settings: tuple[str, ...]
    families: tuple[str, ...]
    says: str
    way_out: Mapping[str, Any] | None = None


UNSPLIT = (
    "qwen3_5", "qwen3_5_moe", "lfm2_vl", "lfm3_vl", "kimi_k25", "gemma4", "glm4v", "glm46v", "qwen3_vl_moe",
    "glm4v_moe", "glm_ocr",
)  # fmt: skip
MASKED = ("kimi_k25", "lfm3_vl")
HYBRID = ("qwen3_5", "qwen3_5_moe", "lfm2_vl")
REFUSED = (
    Refusal(tuple(SETTINGS), ("hf paligemma",), "answers would be visible"),
    Refusal(("pp",), tuple(PUBLISHED + name for name in MASKED), "attention computes scores between samples"),
    Refusal(("pp",), ("hf gemma3", "hf gemma4"), "tokens of an image see each other"),
    Refusal(("context",), ("hf gemma3", "hf gemma4"), "has images whose tokens see each other"),
    Refusal(("pp",), ("hf lfm2_vl",), "its last norm has another name"),
    Refusal(("context",), tuple(PUBLISHED + name for name in MASKED), "has attention that is not plainly causal"),
    Refusal(("context",), tuple(PUBLISHED + name for name in HYBRID), "has layers that are no attention"),
    Refusal(("tp adapters",), ("hf glm4v_moe",), "PEFT adapts other layers"),  # and tp splits no experts
    Refusal(
        ("adapters",),
        ("hf glm4v_moe",),
        "PEFT adapts other layers",
        {"model.lora": {"rank": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
    ),
    Refusal(("tp",), tuple(PUBLISHED + name for name in UNSPLIT), "tensor parallelism cannot split"),
)


def refused_of(family: str, name: str) -> Refusal | None:
    """What REFUSED says of a setting."""
    words = {*name.split(), name}
    return next((one for one in REFUSED if family in one.families and words & set(one.settings)), None)


def trained_of(family: str) -> dict[str, dict[str, Any]]:
    """The chosen settings of a family, with the way out of those that are refused and have one."""
    ways = chosen(SETTINGS, lambda name: name in SHORT.get(family, ()))
    refused = {name: refused_of(family, name) for name in ways}
    left = {name: changes for name, changes in ways.items() if not (one := refused[name]) or one.way_out}
    return {name: changes | ((one.way_out or {}) if (one := refused[name]) else {}) for name, changes in left.items()}


CASES = {family: trained_of(family) for family in chosen({family: family for family in FAMILIES}, SHORT.__contains__)}
TRAINED = [(family, name) for family, settings in CASES.items() for name in settings]


def write_mixed(folder: Path) -> dict[str, Any]:
    """Records of which each third has a picture, one to a sequence: many steps have pictures on one rank only."""
    folder.mkdir()
    records = []
    for number in range(SAMPLES):
        question = f"which number is this, {number} or {number + 1}?"
        record: dict[str, Any] = {"id": f"sample-{number:02}"}
        if number % 3 == 0:
            (folder / f"{number}.png").write_bytes(picture(number, SIZES[number % len(SIZES)]))
            record["image"], question = f"{number}.png", f"<image>\n{question}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"it is {number}"}]
        records.append(record | {"conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))
    return {"source": str(folder / "records.json"), "image_folder": str(folder), "pack": False, "sequence_length": 256}


def base_of(family: str, root: Path) -> dict[str, Any]:
    """What all runs of a family have."""
    return {
        "model": model_of(family, root),
        "data": write_mixed(root / "data") | {"validation_fraction": 0.3}, "features.cache": "off",
        "train.global_batch_size": BATCH, "train.micro_batch_size": 1, "train.max_steps": 0, "train.epochs": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, JobConfig]]:
    """The runs of a family. Families are trained a few at a time: to start processes takes longer than their runs."""
    trained: dict[str, Mapping[str, JobConfig]] = {}
    failed: dict[str, Exception] = {}

    def runs(family: str) -> Mapping[str, JobConfig]:
        if family not in trained | failed:
            together = next(some for some in batched([*CASES], TOGETHER) if family in some)
            roots = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in together}
            try:
                trained.update(train_all(roots))
            except Exception as error:  # once, not in each test of these families
                failed.update(dict.fromkeys(together, error))
        if family in failed:
            raise AssertionError(f"its runs have failed: {failed[family]}") from failed[family]
        return trained[family]

    return runs


def batched(names: list[str], size: int) -> list[list[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]


def train_all(roots: Mapping[str, Path]) -> dict[str, Mapping[str, JobConfig]]:
    """Of each family: a run for each setting, and of one process for each that changes the loss."""
    found: dict[str, dict[str, JobConfig]] = {}
    by_ranks: dict[tuple[int, int, bool], list[JobConfig]] = {}
    for family, root in roots.items():
        base, ways = base_of(family, root), CASES[family]
        references = {reference_of(changes): of_the_loss(changes) for changes in ways.values()}
        plain = {
            f"plain {name}": run(root, f"plain {number}", base | changes | PLAIN)
            for number, (name, changes) in enumerate(references.items())
        }
        made = {name: run(root, name, base | changes) for name, changes in ways.items()}
        if cached := next((job for name, job in made.items() if "cached" in name), None):
            encode_features(cached)
        found[family] = made | plain
        by_ranks.setdefault((1, 1, False), []).extend(plain.values())
        for name, job in made.items():
            nodes = FOUR_RANKS.get(name, 1)
            ranks = (4 // nodes if name in FOUR_RANKS else 2, nodes, name.startswith("zero"))
            by_ranks.setdefault(ranks, []).append(job)
    for (processes, nodes, _), jobs in by_ranks.items():
        arguments = ["--configs", *(f"{job.run.run_uri}/run.json" for job in jobs)]
        module = "tests.support.drivers.train_traced"
        run_ranks(module, arguments, processes=processes, nodes=nodes, timeout_s=60 * len(jobs))
    return dict(found)


def model_of(family: str, root: Path) -> dict[str, Any]:
    if family == "llava":
        return dict(TINY["model"])
    if family in CONFIGS:
        return native_section(family)
    return hf_section(publish(family.removeprefix(PUBLISHED), root / "model"))


def run(root: Path, name: str, changes: Mapping[str, Any]) -> JobConfig:
    features = "reuse" if changes["features.cache"] == "on" else "off"
    return make_run(root, name.replace(" ", "-"), dict(changes), features=features)


def of_the_loss(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name.startswith("model.")}


def reference_of(changes: Mapping[str, Any]) -> str:
    return json.dumps(of_the_loss(changes), sort_keys=True)


def ranks_of(job: JobConfig) -> list[list[dict[str, Any]]]:
    """Of each rank, its steps, and behind them the batches of the validation."""
    return [json.loads(path.read_text()) for path in sorted(Path(job.run.run_uri, "collectives").glob("*.json"))]


@pytest.mark.parametrize(("family", "name"), TRAINED)
def test_ranks_ask_for_the_same_collectives(
    family: str, name: str, runs_of: Callable[[str], Mapping[str, JobConfig]]
) -> None:
    runs = runs_of(family)
    ranks = ranks_of(runs[name])
    assert len(ranks) == (4 if name in FOUR_RANKS else 2)
    kinds = [[step["kind"] for step in steps] for steps in ranks]
    assert all(found == kinds[0] for found in kinds)
    trained = len(losses(runs[name]))
    assert kinds[0] == ["step"] * trained + ["validation"] * (len(kinds[0]) - trained)
    for kind, some, none in (("step", 3, 1), ("validation", 1, 0)):
        on_some, on_none = situations(ranks, kind)
        assert on_some >= some and on_none >= none, f"{kind}: pictures on some ranks only, and on none, must occur"
    if name.startswith("hsdp"):
        assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= {
            tuple(group) for *_, group in collectives(ranks[0]) + collectives(ranks[3])
        }
    for first, second in itertools.combinations(range(len(ranks)), 2):
        for step, (one, other) in enumerate(zip(ranks[first], ranks[second], strict=True)):
            shared = [of_both(each, first, second) for each in (one, other)]
            assert shared[0] == shared[1], f"{one['kind']} {step} of ranks {first} and {second}"
    assert collectives(ranks[0])


@pytest.mark.parametrize(("family", "name"), TRAINED)
def test_losses_are_those_of_one_process(
    family: str, name: str, runs_of: Callable[[str], Mapping[str, JobConfig]]
) -> None:
    runs = runs_of(family)
    reference = runs[f"plain {reference_of(CASES[family][name])}"]
    expected, bound = losses(reference), RELATIVE_BF16 if "bf16" in name else RELATIVE
    assert len(set(expected)) == len(expected) > 4
    assert losses(runs[name]) == pytest.approx(expected, rel=bound)
    validated = [metrics(job)[-1][VALIDATION_LOSS] for job in (reference, runs[name])]
    assert validated[1] == pytest.approx(validated[0], rel=bound)


def collectives(steps: list[dict[str, Any]]) -> list[Any]:
    return [one for step in steps for one in step["collectives"] if one[0] not in POINT_TO_POINT]


def of_both(step: dict[str, Any], first: int, second: int) -> list[Any]:
    """Collectives of groups with both ranks."""
    return [one for one in collectives([step]) if {first, second} <= set(one[2])]


def situations(ranks: list[list[dict[str, Any]]], kind: str) -> tuple[int, int]:
    """Micro-steps with pictures on some ranks only, and on none."""
    images = [[has_any for step in steps if step["kind"] == kind for has_any in step["images"]] for steps in ranks]
    together = list(zip(*images, strict=True))
    return sum(any(some) != all(some) for some in together), sum(not any(some) for some in together)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_what_the_product_refuses(family: str, tmp_path: Path) -> None:
    """Planning a run refuses it, and training too; and both take the way out."""
    base = base_of(family, tmp_path)
    for name, changes in SETTINGS.items():
        refused, found = refused_of(family, name), refusal(base | changes)
        assert bool(refused) == bool(found) and (not refused or refused.says in found), (name, found)
        if refused and refused.way_out:
            assert not refusal(base | changes | refused.way_out), name
        if refused:
            job = run(tmp_path, name, base | changes)
            processes = max(value for key, value in {"": 1, **changes}.items() if not key or key.endswith("_parallel"))
            arguments = ["--config", f"{job.run.run_uri}/run.json"]
            codes, texts = ends_of_ranks("vlmpipe.trainer.train", arguments, processes=processes)
            assert codes == [ExitCode.CONFIG] * processes and refused.says in texts[0], (name, codes, texts[0])


def refusal(changes: Mapping[str, Any]) -> str:
    """What planning a run says against it; empty where nothing."""
    four = {"cluster.processes_per_replica": 4}
    try:
        config = parse_run_config(merged(TINY, {**changes, **four}), "run.yaml")
        architecture(config)
        require_degree(config)
    except UserError as error:
        return error.text()
    return ""
