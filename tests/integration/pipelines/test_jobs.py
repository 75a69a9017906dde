"""The jobs as a run has them: features encoded once, a checkpoint exported, validation questions answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.data.prepared import without_signatures
from tests.support.trainer.benchmark_files import write
from tests.support.trainer.runs import encode_features, ends_of_ranks, make_run, metrics, run_ranks, summary, train_runs
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.benchmarks import SCORES, BenchmarkFormat
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.near_duplicates.table import SHOWN_PAIRS
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode
from vlmpipe.trainer.evaluation.benchmarks.readers import read_benchmark
from vlmpipe.trainer.evaluation.benchmarks.scores import score
from vlmpipe.trainer.feature_cache.reader import FeatureReader, missing_images
from vlmpipe.trainer.feature_cache.store import features_key
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.evaluation_notes import overlap_sentence
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import crc32c_of_file
from vlmpipe.trainer.storage.export_manifest import write_description
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_lines, read_record, write_record
from vlmpipe.trainer.weights_digest import weights_sha256

VALIDATED = {"train.validate_every_steps": 1000, "train.validation_sequences": 1}  # after the last step only
BENCHMARKS: tuple[BenchmarkFormat, ...] = ("pope", "mmbench")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """A run whose features are encoded and whose model is trained a little, exported and evaluated."""
    root = tmp_path_factory.mktemp("jobs")
    benchmarks = [write(root / form, form).model_dump() for form in BENCHMARKS]
    changes = {"train.epochs": 1, "evaluate.benchmarks": benchmarks, "features.shard_images": 12, **VALIDATED}
    job = make_run(root, "run", changes)
    run_ranks("vlmpipe.trainer.feature_cache.encode", ["--config", f"{job.run.run_uri}/run.json"], processes=2)
    train_runs([job, job], processes=1)  # the second time nothing is left to do
    sync_run(job)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=2)
    return job


@pytest.fixture
def result(job: JobConfig) -> dict[str, Any]:
    return dict(json.loads(open_storage(job.run.run_uri).read("evaluate.json")))


def predictions(job: JobConfig) -> Iterator[dict[str, Any]]:
    for line in open_storage(job.run.run_uri).read("predictions.jsonl").decode().splitlines():
        yield json.loads(line)


def test_training_that_was_finished_before_is_left_as_it_is(job: JobConfig) -> None:
    record = json.loads(open_storage(job.run.run_uri).read("steps/train.json"))
    assert (record["state"], record["message"]) == ("reused", f"all {summary(job)['steps']} steps were made before")
    assert summary(job)["resumed_from_step"] is None, "the summary is of the attempt that trained"
    assert [line["step"] for line in metrics(job)] == list(range(1, summary(job)["steps"] + 1))


def test_every_image_has_features_of_the_tower(job: JobConfig) -> None:
    images = Index.load(job.pointers().prepared_uri).unique_images()
    assert images and missing_images(job.pointers().features_uri, images) == []
    features = FeatureReader.open(job.pointers().features_uri).read(next(iter(images)))
    assert features.shape == (16, 32) and features.dtype == torch.bfloat16


def test_one_rank_encodes_what_two_do(job: JobConfig, tmp_path: Path) -> None:
    """Two encoded the run's images, each its shards of the list, whose locations it read by range."""
    record = json.loads(open_storage(job.run.run_uri).read("run.json"))
    record["run"]["root_uri"] = str(tmp_path)
    alone = LocalStorage(tmp_path / "runs" / job.run.run_id)
    alone.write("run.json", json.dumps(record).encode())
    alone.write("prepared.json", open_storage(job.run.run_uri).read("prepared.json"))
    encode_features(JobConfig.load(alone.uri("run.json")))
    by_two, by_one = (LocalStorage(Path(root, "features")) for root in (job.run.root_uri, tmp_path))
    names = [info.name for info in by_two.list()]
    assert [name for name in names if by_one.read(name) != by_two.read(name)] == []
    assert len(names) == len(by_one.list()) and sum(name.endswith(".safetensors") for name in names) >= 4


def test_encoding_again_does_nothing(job: JobConfig) -> None:
    store = LocalStorage(job.pointers().features_uri)
    before = store.list()
    run_ranks("vlmpipe.trainer.feature_cache.encode", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    assert store.list() == before


def test_the_features_key_covers_what_decides_the_numbers(job: JobConfig) -> None:
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"feature_layer": 0},
        {"image_size": 64},
        {"tower": {"config": {**job.model.tower.config, "hidden_size": 64}}},
    ]
    models = [ModelConfig.model_validate(job.model.model_dump() | change) for change in changes]
    keys = {features_key(model, "fp32") for model in (job.model, *models)}
    keys.add(features_key(job.model, "bf16"))  # in which the tower then computes
    assert len(keys) == 2 + len(changes)
    other_tokenizer = job.model.model_copy(update={"tokenizer": "train:999"})
    assert features_key(other_tokenizer, "fp32") == features_key(job.model, "fp32")


def test_a_damaged_feature_shard_is_not_read(job: JobConfig, tmp_path: Path) -> None:
    source = LocalStorage(job.pointers().features_uri)
    copy = LocalStorage(tmp_path)
    for info in source.list():
        copy.write(info.name, source.read(info.name))
    name = next(info.name for info in copy.list() if info.name.endswith(".safetensors"))
    data = bytearray(copy.read(name))
    data[-1] ^= 1
    copy.write(name, bytes(data))
    image = json.loads(copy.read(name.replace(".safetensors", ".json")))["images"][0]
    with pytest.raises(DataError, match="is damaged"):
        FeatureReader.open(copy.root_uri).read(image)


def test_an_image_that_was_never_encoded_is_named(job: JobConfig) -> None:
    with pytest.raises(DataError, match="no cached features for image 0000"):
        FeatureReader.open(job.pointers().features_uri).read("0" * 64)


def test_exporting_again_does_nothing_and_a_run_without_a_checkpoint_is_refused(job: JobConfig) -> None:
    assert sync_run(job)["reused"]
    empty = job.model_copy(update={"run": job.run.model_copy(update={"run_id": "never-trained"})})
    with pytest.raises(ConfigError, match="no committed checkpoint"):
        sync_run(empty)


def test_the_export_is_the_checkpoint(job: JobConfig) -> None:
    model = family_of(job.model).load(Path(job.run.run_uri, "export"))
    marker = json.loads(open_storage(job.run.run_uri).read("export/vlmpipe.json"))
    assert weights_sha256(model) == marker["weights_sha256"]


def test_every_held_out_question_is_answered_once(job: JobConfig, result: dict[str, Any]) -> None:
    held_out = Index.load(job.pointers().prepared_uri).split("eval")
    asked = [(each["id"], each["turn"]) for each in predictions(job)]
    assert len(asked) == len(set(asked)) == result["questions"] == int(held_out.turns.sum())
    assert {identity for identity, _ in asked} == set(held_out.ids)


def test_the_scores_are_those_of_the_predictions(job: JobConfig, result: dict[str, Any]) -> None:
    right = [each["correct"] for each in predictions(job)]
    assert result["exact_match"] == pytest.approx(sum(right) / len(right))
    questions = sum(each["questions"] for each in result["slices"].values())
    assert questions == len(right)
    assert set(result["controls"]) == {"shuffled_image", "no_image"}
    assert all(control["questions"] == len(right) for control in result["controls"].values())
    assert 0 < result["loss"] < 10


def test_the_export_has_the_validation_loss_that_training_had(job: JobConfig, result: dict[str, Any]) -> None:
    (line,) = (line for line in metrics(job) if "validation_loss" in line)
    found = result["validated"]
    assert found["loss_of_export"] == pytest.approx(found["loss_in_training"], rel=1e-4)
    names = ("step", "validation_label_tokens", "validation_loss")
    assert tuple(line[name] for name in names) == (found["step"], found["label_tokens"], found["loss_in_training"])
    assert abs(result["loss"] - found["loss_of_export"]) > 1e-3, "one sequence is not all"


@pytest.mark.slow
def test_an_export_of_other_weights_ends_the_evaluation(job: JobConfig, tmp_path: Path) -> None:
    """Whole files, with the names and shapes of the model: sync-checkpoint has nothing against them."""
    shutil.copytree(job.run.run_uri, tmp_path / "runs" / job.run.run_id)
    other = job.model_copy(update={"run": job.run.model_copy(update={"root_uri": str(tmp_path)})})
    run, weights = open_storage(other.run.run_uri), Path(other.run.run_uri, "export/model.safetensors")
    write_record(run, "run.json", read_record(run, "run.json") | {"run": other.run.model_dump()})
    tensors = load_file(weights)
    tensors["multi_modal_projector.linear_2.weight"] *= -1
    save_file(tensors, weights, {"format": "pt"})
    described = read_record(run, "export/vlmpipe.json")
    described["files"][weights.name] = {"bytes": weights.stat().st_size, "crc32c": crc32c_of_file(weights)}
    write_description(run, described)
    run.delete("evaluate.json")
    codes, said = ends_of_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", run.uri("run.json")], processes=1)
    assert codes == [ExitCode.BAD_EXPORT] and "the export has a validation loss of" in said[0]
    assert run.stat("evaluate.json") is None


@pytest.mark.parametrize("form", BENCHMARKS)
def test_benchmarks_are_answered_and_scored_with_intervals(
    job: JobConfig, result: dict[str, Any], form: BenchmarkFormat
) -> None:
    (config,) = (one for one in job.evaluate.benchmarks if one.name == form)
    questions = read_benchmark(config, job.data.max_image_bytes)
    lines = read_lines(open_storage(job.run.run_uri), f"benchmarks/{form}.jsonl")
    assert [line["id"] for line in lines] == [question.id for question in questions]
    found = result["benchmarks"][form]
    assert 0 <= found["images_like_train"] <= found["images"] - found["images_without_signature"]
    assert len(found["pairs_like_train"]) == min(found["images_like_train"], SHOWN_PAIRS)
    assert found["scores"] == score(form, questions, [line["prediction"] for line in lines]).scores()
    assert set(found["scores"]) == set(SCORES[form]) == set(found["intervals"])
    assert all(low <= found["scores"][name] <= high for name, (low, high) in found["intervals"].items())


def test_evaluating_on_another_number_of_processes_gives_the_same_result(
    job: JobConfig, result: dict[str, Any]
) -> None:
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    again = json.loads(open_storage(job.run.run_uri).read("evaluate.json"))
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert {key: again[key] for key in ("exact_match", "slices", "held_out_sha256", "benchmarks")} == {
        key: result[key] for key in ("exact_match", "slices", "held_out_sha256", "benchmarks")
    }


def test_data_that_was_prepared_before_images_had_signatures_is_evaluated(job: JobConfig, tmp_path: Path) -> None:
    """What look-alikes are among its images is null then, also of benchmarks; all else is as it was."""
    shutil.copytree(job.run.run_uri, tmp_path / "runs" / job.run.run_id)
    shutil.copytree(job.pointers().prepared_uri, tmp_path / "prepared")
    older = job.model_copy(update={"run": job.run.model_copy(update={"root_uri": str(tmp_path)})})
    without_signatures(tmp_path / "prepared")
    run = open_storage(older.run.run_uri)
    write_record(run, "run.json", read_record(run, "run.json") | {"run": older.run.model_dump()})
    pointers = read_record(run, "prepared.json") | {"prepared_uri": str(tmp_path / "prepared")}
    write_record(run, "prepared.json", pointers)
    expected = read_record(run, "evaluate.json")
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", run.uri("run.json")], processes=1)
    found = read_record(run, "evaluate.json")
    assert found.keys() == expected.keys() and found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for part, other in (
        (found, expected),
        *((found["benchmarks"][form], expected["benchmarks"][form]) for form in BENCHMARKS),
    ):
        assert part["images_like_train"] is part["like_train_compared"] is None
        assert isinstance(other["images_like_train"], int)
    assert "not known which images look like training images" in overlap_sentence(Evaluation.model_validate(found))
    assert "not known" not in overlap_sentence(Evaluation.model_validate(expected))
