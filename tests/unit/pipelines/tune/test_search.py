"""What a search may cost, and which files its trials share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.pipelines.tune.search import dearest_trial, num_points, open_search, points, require_tuning
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import unseal, write_record

LLAVA = ROOT / "configs/llava-7b.yaml"


def test_a_trial_is_priced_at_the_values_that_cost_most() -> None:
    epochs = "{train.epochs: {discrete_value_spec: {values: [1, 4, 10]}}, train.optimizer.learning_rate: "
    rates = "{double_value_spec: {min_value: 1.0e-5, max_value: 1.0e-4}}}"
    config = load_run_file(LLAVA, [f"tune={{parameters: {epochs}{rates}}}"])
    assert config.train.epochs == 1 and dearest_trial(config).train.epochs == 10


def test_values_of_which_the_plan_says_that_they_fail_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = "{train.precision: {categorical_value_spec: {values: [bf16, fp32]}}}"
    config = load_run_file(LLAVA, [f"tune={{parameters: {kinds}}}"])

    def dearest_fails(run: RunConfig) -> SimpleNamespace:
        fails = run.train.precision == "fp32"
        return SimpleNamespace(state="red" if fails else "green", cost=SimpleNamespace(usd=2000.0 if fails else 50.0))

    monkeypatch.setattr("vlmpipe.planner.plan.plan_run", dearest_fails)
    assert dearest_trial(config).train.precision == "bf16"


def test_a_value_whose_cost_is_not_known_is_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = "{train.epochs: {discrete_value_spec: {values: [1, 4, 10]}}}"
    config = load_run_file(LLAVA, [f"tune={{parameters: {epochs}}}"])

    def unknown_for_one(run: RunConfig) -> SimpleNamespace:
        usd = None if run.train.epochs == 1 else 50.0
        return SimpleNamespace(state="green", cost=SimpleNamespace(usd=usd))

    monkeypatch.setattr("vlmpipe.planner.plan.plan_run", unknown_for_one)
    assert dearest_trial(config).train.epochs == 1


def test_a_grid_over_more_numbers_than_memory_holds_has_its_first_trials() -> None:
    seeds = "{train.seed: {integer_value_spec: {min_value: 1, max_value: 100000000000000000}}, "
    epochs = "train.epochs: {discrete_value_spec: {values: [1, 2]}}}"
    tune = f"tune={{algorithm: GRID_SEARCH, max_trial_count: 3, parameters: {seeds}{epochs}}}"
    tuning = require_tuning(load_run_file(LLAVA, [tune, "train.validate_every_steps=10"]))
    assert num_points(tuning) == 3
    assert [tuple(point.values()) for point in points(tuning)] == [(1, 1), (1, 2), (2, 1)]


def test_a_batch_between_the_ends_of_a_range_is_tried_by_check() -> None:
    batches = "{train.global_batch_size: {integer_value_spec: {min_value: 128, max_value: 256}}}"
    config = load_run_file(LLAVA, [f"tune={{parameters: {batches}}}", "train.validate_every_steps=10"])
    with pytest.raises(RunFileError, match="found 129, expected a multiple"):
        require_tuning(config)


def test_trials_share_the_data_of_a_run_where_it_was_moved_to(tmp_path: Path) -> None:
    rates = "{train.optimizer.learning_rate: {double_value_spec: {min_value: 1.0e-5, max_value: 1.0e-4}}}"
    config = load_run_file(ROOT / "configs/digits.yaml", [f"tune={{parameters: {rates}}}"])
    before, after = tmp_path / "before", tmp_path / "after"
    paths = RunPaths(run_id="base", root_uri=str(before))
    pointers = {"prepared_uri": f"{before}/prepared/0a", "features_uri": "", "features": "off"}
    records = {"run.json": config.to_run_json(paths), "prepared.json": pointers, "summary.json": {"steps": 1}}
    for name, content in records.items():
        write_record(LocalStorage(paths.run_uri), name, content)
    before.rename(after)
    found = open_search(config, "base", "search", str(after))
    assert unseal(found.files["prepared.json"], required=True)["prepared_uri"] == f"{after}/prepared/0a"
