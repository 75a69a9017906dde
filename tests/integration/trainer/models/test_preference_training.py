"""Training on pairs: as one process whatever the strategy, from references that are computed once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hf.publish import model_section, publish
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import begin_in_the_middle
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import losses, make_run, run_ranks, summary, train_runs
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.strategies import PREFERRING
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.features.preferences import references
from vlmpipe.trainer.features.preferences.references import PART, POINTER, read_references, references_of_run
from vlmpipe.trainer.storage import open_storage

STRATEGIES = chosen(dict.fromkeys(PREFERRING), lambda name: name in ("fsdp", "zero2"))
RELATIVE, STOP_STEP = 1e-5, 2
ADAPTERS = {"model.lora": {"rank": 4}}
SIMPO = {"train.objective": "simpo", "train.global_batch_size": 64, "train.micro_batch_size": 16}
PAIRS = {
    "train.objective": "dpo",
    "train.max_steps": 4 if WHOLE else 3,
    "train.dpo_beta": 0.5,
    "data.max_samples": 120 if WHOLE else 60,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """`reference` on one process, all others on two."""
    root = tmp_path_factory.mktemp("pairs")

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(root, name, {"features.cache": "off", **PAIRS, **changes}, features="off")

    reference = run("reference", {"train.micro_batch_size": 8})
    adapted = [run("adapted", {"train.micro_batch_size": 8, **ADAPTERS})] if WHOLE else []
    train_runs([reference, *adapted], processes=1)
    middle = {"train.checkpoint_every_steps": STOP_STEP}
    made = {name: run(name, {"train.strategy": name, **middle}) for name in STRATEGIES}
    if WHOLE:
        made |= {
            f"lora {name}": run(f"lora-{name}", {"train.strategy": name, **ADAPTERS}) for name in ("fsdp", "zero2")
        }
    train_runs([*made.values()], processes=2)
    made["resumed"] = run("resumed", {"train.strategy": "fsdp"})
    begin_in_the_middle(made["resumed"], made["fsdp"], STOP_STEP)
    train_runs([made["resumed"]], processes=2)
    return {"reference": reference, **made, **{job.run.run_id: job for job in adapted}}


@pytest.fixture(scope="module")
def any_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("any-model")
    data = write_data(root / "data", pairs=True)
    base = {
        "model": model_section(publish("internvl", root / "model")), "features.cache": "off", "train.max_steps": 3,
        "data": {**data, "sequence_length": 384, "validation_fraction": 0.3}, "train.optimizer.learning_rate": 1e-3,
    }  # fmt: skip
    dpo = base | {"train.objective": "dpo", "train.global_batch_size": 4}
    made = {
        "reference": make_run(root, "reference", dpo | {"train.micro_batch_size": 4}, features="off"),
        "simpo": make_run(root, "simpo", base | SIMPO, features="off"),
    }
    train_runs(list(made.values()), processes=1)
    if not WHOLE:  # forward passes are the family's, and what ranks share of them is that of `runs`
        return made
    made["fsdp"] = make_run(root, "fsdp", dpo | {"train.strategy": "fsdp", "train.micro_batch_size": 1}, features="off")
    train_runs([made["fsdp"]], processes=2)
    return made


@pytest.mark.parametrize("name", STRATEGIES)
def test_pairs_train_under_each_strategy_as_on_one_process(name: str, runs: dict[str, JobConfig]) -> None:
    expected = losses(runs["reference"])
    assert expected[0] == pytest.approx(math.log(2), abs=1e-6), "the model prefers nothing beyond its own reference"
    assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE)
    assert summary(runs[name])["world_size"] == 2


@pytest.mark.slow
def test_adapters_are_trained_against_the_base_without_them(runs: dict[str, JobConfig]) -> None:
    expected = losses(runs["adapted"])
    assert expected[0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected[1:] != pytest.approx(losses(runs["reference"])[1:], rel=RELATIVE)
    for name in ("lora fsdp", "lora zero2"):
        assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE), name
    base, adapted = (references_of_run(runs[name].run.run_uri, "eval") for name in ("reference", "adapted"))
    assert adapted == pytest.approx(base, rel=RELATIVE)


def test_a_resumed_run_prefers_against_the_first_weights(runs: dict[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["fsdp"])


def test_references_are_computed_once_for_model_and_data_and_checked(runs: dict[str, JobConfig]) -> None:
    plain = [job for job in runs.values() if not job.model.lora]
    uris = {json.loads(open_storage(job.run.run_uri).read(POINTER))["uri"] for job in plain}
    assert len(uris) == 1, "the same model and data, whatever the strategy"
    (uri,) = uris
    file = Path(uri, "train.npy")
    content = file.read_bytes()
    first = min(path.stat().st_mtime_ns for job in plain for path in Path(job.run.run_uri).glob("metrics.jsonl"))
    assert file.stat().st_mtime_ns < first, "later runs have not written them again"
    assert (references_of_run(runs["fsdp"].run.run_uri, "eval") < 0).all()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        read_references(uri, "train")
    file.write_bytes(content)


def sequences_of(job: JobConfig) -> list[int]:
    """Packed sequences of pairs of each split."""
    index = Index.load(job.pointers().prepared_uri)
    samplers = (
        PackedBatchSampler(index.split(split), job.data, seed=0, global_batch_size=1, in_pairs=True) for split in SPLITS
    )
    return [sampler.num_steps(1) for sampler in samplers]


@pytest.mark.parametrize("processes", [2, 3] if WHOLE else [2])
def test_ranks_share_the_pass_whether_or_not_each_has_a_sequence_in_its_last_step(
    processes: int, runs: dict[str, JobConfig], tmp_path: Path
) -> None:
    small = {"train.max_steps": 1, "train.micro_batch_size": 1, "train.global_batch_size": processes}
    changes = {"features.cache": "off", **PAIRS, **small, "train.strategy": "fsdp"}
    job = make_run(tmp_path, "shared", changes, features="off")
    assert any(sequences % processes for sequences in sequences_of(job)), "of a split, one rank must have one less"
    train_runs([job], processes=processes)
    for split in ("train", "eval"):
        found, expected = (references_of_run(one.run.run_uri, split) for one in (job, runs["reference"]))
        assert found == pytest.approx(expected, rel=RELATIVE)


def test_an_interrupted_pass_goes_on_where_it_was(runs: dict[str, JobConfig]) -> None:
    """On another number of ranks. What was known is not computed again, as values that no model gives show."""
    uri = json.loads(open_storage(runs["reference"].run.run_uri).read(POINTER))["uri"]
    whole = read_references(uri, "train")
    assert whole is not None
    known = np.arange(len(whole)) % len(whole) < len(whole) // 2
    begun = np.full_like(whole, np.nan)
    begun[known] = -1
    for name in ("train.json", "train.npy"):
        Path(uri, name).unlink()
    references._write(uri, f"train{PART}", begun)
    one = {"train.max_steps": 1, "train.micro_batch_size": 1, "train.global_batch_size": 1}
    changes = {"features.cache": "off", **PAIRS, **one}
    job = make_run(Path(runs["reference"].run.root_uri), "interrupted", changes, features="off")
    train_runs([job], processes=1)
    found = read_references(uri, "train")
    assert found is not None and not Path(uri, f"train{PART}.npy").exists()
    assert found[~known] == pytest.approx(whole[~known], rel=RELATIVE)
    is_packed_with_others = (found[known] != -1).all(axis=1)
    assert is_packed_with_others.mean() < 0.5
    references._write(uri, "train", whole)


def test_a_model_of_any_type_trains_on_pairs(any_model: dict[str, JobConfig]) -> None:
    """Through its own forward pass, with the images of both conversations; in the long form also on two processes."""
    reference = losses(any_model["reference"])
    assert reference[0] == pytest.approx(math.log(2), abs=1e-6) and reference[1:] != pytest.approx(reference[:-1])
    for name in ("fsdp",) if WHOLE else ():
        assert losses(any_model[name]) == pytest.approx(reference, rel=RELATIVE)


def test_simpo_trains_without_references(any_model: dict[str, JobConfig]) -> None:
    job = any_model["simpo"]
    assert not Path(job.run.run_uri, POINTER).exists(), "no pass over the data under a reference"
    first, *later = losses(job)
    assert all(loss < first for loss in later[-2:]), "the same pairs in each step"
    sync_run(job)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    found = json.loads(open_storage(job.run.run_uri).read("evaluate.json"))
    assert 0 < found["simpo_loss"] < 10 and 0 <= found["reward_accuracy"] <= 1 and found["preference_accuracy"] >= 0
    assert "dpo_loss" not in found


def test_the_evaluation_says_what_is_preferred(runs: dict[str, JobConfig]) -> None:
    job = runs["reference"]
    sync_run(job)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=2)
    found = json.loads(open_storage(job.run.run_uri).read("evaluate.json"))
    references = references_of_run(job.run.run_uri, "eval")
    assert found["reference_preference_accuracy"] == pytest.approx((references[:, 0] > references[:, 1]).mean())
    assert 0 <= found["preference_accuracy"] <= 1 and found["dpo_loss"] != pytest.approx(math.log(2), abs=1e-6)
