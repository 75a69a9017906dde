"""The loss on held-out rows is the same whoever computes it, and training goes on as if nobody had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import NODES, RELATIVE, trained_weights
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import losses, make_run, metrics, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.setup.training import build_training
from vlmpipe.trainer.strategies.registry import strategy_names

NUM_STEPS = 5 if WHOLE else 3
VALIDATED = [*range(2, NUM_STEPS, 2), NUM_STEPS]
RUN = {
    "train.max_steps": NUM_STEPS, "train.micro_batch_size": 8,
    "features.cache": "off", "data.pack": False, "data.validation_fraction": 0.2,
}  # fmt: skip
# 5 rows: the copies' last micro-batches are partly empty. Checkpoints are taken where weights were just gathered.
VALIDATING = {
    "train.best_metric": "validation_exact_match",  # measured beside the loss
    "train.validate_every_steps": 2,
    "train.validation_sequences": 5,
    "train.checkpoint_every_steps": 2,
    "train.ema_decay": 0.6,
}
OF_THE_START = {"train.ema_decay": 1 - 1e-9}  # an average that hardly moves
OF_TWO_SOURCES = {
    "data.source": "",
    "data.max_samples": 0,
    "data.pack": True,
    "data.sequence_length": 128,
    "data.sources": [
        {"name": "digits", "uri": "builtin:digits", "max_samples": 40},
        {"name": "few", "uri": "builtin:digits", "max_samples": 25},
    ],
}
DROPPING = {"model.lora": {"rank": 4, "dropout": 0.2}}
STRATEGIES = chosen(
    {name: NODES.get(name, 1) for name in strategy_names()},
    lambda name: name in ("ddp", "zero3", "pp"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """`plain` and those that drop out on one process, and of two sources one process, and each strategy on two, or on
    two nodes of two."""
    root = tmp_path_factory.mktemp("held-out")

    def job(name: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(root, name, RUN | changes, features="off")

    done = {
        "plain": job("plain", VALIDATING),
        "dropping": job("dropping", DROPPING),
        "dropping, validating": job("dropping-validating", DROPPING | VALIDATING | OF_THE_START),
    }
    done["of two sources"] = job("of-two-sources", VALIDATING | OF_TWO_SOURCES | EVERY_STEP)
    train_runs(list(done.values()), processes=1)
    for nodes in sorted(set(STRATEGIES.values())):
        names = [name for name in STRATEGIES if STRATEGIES[name] == nodes]
        rows = {"train.micro_batch_size": 2 // nodes}
        done |= {name: job(name, VALIDATING | OF_TWO_SOURCES | strategy_changes(name) | rows) for name in names}
        train_runs([done[name] for name in names], processes=2, nodes=nodes)
    return done


def held_out(job: JobConfig) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in metrics(job) if "validation_loss" in line}


def exact_matches(job: JobConfig) -> dict[int, float]:
    return {line["step"]: line["validation_exact_match"] for line in metrics(job) if "validation_exact_match" in line}


def test_validation_runs_at_its_interval_and_at_the_end(runs: dict[str, JobConfig]) -> None:
    found = held_out(runs["plain"])
    assert list(found) == VALIDATED
    assert len(set(found.values())) == len(found), "the model learns between them"
    assert list(held_out(runs["dropping"])) == [NUM_STEPS], "that with which the export is compared"


def test_validation_does_not_change_training(runs: dict[str, JobConfig]) -> None:
    """Although training drops out by random numbers, and validation does not."""
    validating, plain = runs["dropping, validating"], runs["dropping"]
    assert losses(validating) == losses(plain)
    weights, expected = trained_weights(validating), trained_weights(plain)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_validation_uses_averaged_weights(runs: dict[str, JobConfig]) -> None:
    """Which is that of the start here, while the weights themselves learn."""
    job = runs["dropping, validating"]
    assert list(held_out(job)) == VALIDATED
    assert list(held_out(job).values()) == pytest.approx([held_out(job)[2]] * len(VALIDATED), rel=RELATIVE)
    assert losses(job)[-1] < losses(job)[0] - 0.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_finds_the_same_and_trains_on_the_same(strategy: str, runs: dict[str, JobConfig]) -> None:
    job, reference = runs[strategy], runs["of two sources"]
    assert summary(job)["world_size"] == 2 * STRATEGIES[strategy]
    assert held_out(job) == pytest.approx(held_out(reference), rel=RELATIVE)
    assert exact_matches(job) == exact_matches(reference) and len(exact_matches(job)) == len(held_out(job))
    require_equal_training(job, reference)


def test_the_loss_of_each_source_is_a_share_of_the_whole(runs: dict[str, JobConfig]) -> None:
    """On one process and on two, whose sequences are divided source by source."""
    alone, shared = ([line for line in metrics(runs[name]) if "validation_loss" in line]
                     for name in ("of two sources", "ddp"))  # fmt: skip
    names = ["validation_loss", "validation_loss/digits", "validation_loss/few"]
    for line, other in zip(alone, shared, strict=True):
        assert [line[name] for name in names] == pytest.approx([other[name] for name in names], rel=RELATIVE)
        whole, *parts = (line[name] for name in names)
        assert min(parts) < whole < max(parts)
    job = build_training(runs["of two sources"], ProcessContext(0, 1, 0, 1, torch.device("cpu")))
    assert job.validation
    weights = {group.source: group.label_tokens for group in job.validation.groups}
    (*_, last) = alone
    mean = sum(last[f"validation_loss/{name}"] * tokens for name, tokens in weights.items()) / sum(weights.values())
    assert last["validation_loss"] == pytest.approx(mean, rel=1e-6)
    assert not any("/" in name for line in metrics(runs["plain"]) for name in line)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_training_loss_of_each_source_does_not_depend_on_the_strategy(
    strategy: str, runs: dict[str, JobConfig]
) -> None:
    """Nor on accumulation and ranks; and their mean over label tokens is the loss."""
    reference = metrics(runs["of two sources"])
    setup = build_training(runs["of two sources"], ProcessContext(0, 1, 0, 1, torch.device("cpu")))
    train, sampler = Index.load(runs["of two sources"].pointers().prepared_uri).split("train"), setup.loader.sampler
    seen = set[str]()
    for line, other in zip(reference, metrics(runs[strategy]), strict=True):
        parts = {name: value for name, value in line.items() if name.startswith("loss/")}
        found = {name: value for name, value in other.items() if name.startswith("loss/")}
        assert found == pytest.approx(parts, rel=RELATIVE)
        labels = Counter[str]()
        batch = sampler.batch(line["step"] - 1)
        for row in batch.sequences_of(0, 1):
            for sample in sampler.plan(batch.epoch).members_of(row):
                labels["loss/" + train.ids[sample].partition("/")[0]] += int(train.label_tokens[sample])
        assert labels.keys() == parts.keys()
        mean = sum(parts[name] * count for name, count in labels.items()) / labels.total()
        assert line["loss"] == pytest.approx(mean, rel=1e-6)
        seen |= parts.keys()
    assert seen == {"loss/digits", "loss/few"} and len(reference) == NUM_STEPS


def test_a_run_that_cannot_validate_is_refused(tmp_path: Path) -> None:
    job = make_run(tmp_path, "nothing-held-out", VALIDATING | {"data.validation_fraction": 0.0}, features="off")
    with pytest.raises(ConfigError, match=r"validate_every_steps 2, but the validation split is empty"):
        build_training(job, ProcessContext(0, 1, 0, 1, torch.device("cpu")))
    train = job.train.model_copy(update={"validate_every_steps": 0})
    setup = build_training(job.model_copy(update={"train": train}), ProcessContext(0, 1, 0, 1, torch.device("cpu")))
    assert setup.validation is None, "nobody asked for it"
