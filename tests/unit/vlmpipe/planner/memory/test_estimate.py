"""Settings that fit where a run file's do not, and the bound that rules most of them out without a trace."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.jobs.nodes import launcher_share
from vlmpipe.planner.memory import estimate
from vlmpipe.planner.memory.components import Setting
from vlmpipe.planner.memory.estimate import NEAREST, estimate_memory
from vlmpipe.planner.model_architecture import architecture

GIB = 2**30
SMALL = launcher_share(LocalMachine(16, 64 * GIB, GIB), 1)
DIGITS = ROOT / "configs/digits.yaml"
SHORT = ("llava-7b.yaml",)  # which other tests plan too
RUN_FILES = [path for path in sorted(ROOT.glob("configs/*.yaml")) if WHOLE or path.name in SHORT]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_memory_without_activations_is_a_lower_bound(path: Path) -> None:
    for run in load_run_file(path).stage_runs().values():
        model, catalog = architecture(run), load_catalog()
        machine, gpu = catalog.machines[run.cluster.machine_type], catalog.gpus.get(run.cluster.accelerator_type)
        whole = estimate_memory(run, model, machine, gpu, nearest=False)
        bound = estimate_memory(run, model, machine, gpu, nearest=False, traced=False)
        assert 0 < bound.total_bytes < whole.total_bytes


def test_a_frozen_base_that_a_gpu_cannot_hold_is_to_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "NEAREST", 1)
    path, catalog = ROOT / "configs/llava-7b-lora.yaml", load_catalog()
    whole, sharded = (
        load_run_file(path, ["train.activation_checkpointing=full", f"train.shard_frozen_weights={value}"])
        for value in ("false", "true")
    )
    machine = catalog.machines[whole.cluster.machine_type]
    gpu = dataclasses.replace(catalog.gpus[whole.cluster.accelerator_type], memory_gib=13)  # less than the base's bf16
    memory = estimate_memory(whole, architecture(whole), machine, gpu)
    (setting,) = memory.nearest
    assert not memory.fits and setting.change == {"train.shard_frozen_weights": True}
    again = estimate_memory(sharded, architecture(sharded), machine, gpu)
    assert again.fits and again.total_bytes == setting.total_bytes


def test_changes_that_cannot_fit_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run_file(DIGITS)
    traced = Mock(wraps=estimate.activations)
    monkeypatch.setattr(estimate, "activations", traced)
    memory = estimate_memory(run, architecture(run), SMALL, None)
    assert not memory.fits and not memory.nearest
    assert traced.call_count == 1, "the run file's own"


def test_no_more_settings_are_estimated_than_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    settings = (Setting({"train.micro_batch_size": next(made)}, 0, True) for _ in range(100))
    monkeypatch.setattr(estimate, "_nearest", lambda *_given: settings)
    run = load_run_file(DIGITS)
    memory = estimate_memory(run, architecture(run), SMALL, None)
    assert len(memory.nearest) == next(made) == NEAREST
