"""recipes/horovod in processes of its own: equal to one process, and elastic."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT

PROGRAM = ROOT / "tests/support/trainer/horovod_program.py"
RECIPE, ENVIRONMENT = ROOT / "recipes/horovod", ROOT / "build/recipes/horovod"
SAMPLES, MICRO_BATCH, STEPS = 50, 4, 14
SETTINGS = {"steps": STEPS, "micro_batch": MICRO_BATCH, "learning_rate": 0.005}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (ENVIRONMENT / ".installed").is_file(), reason="make recipe-horovod makes its environment"),
]


def run(folder: Path, *launch: str, fusion: int | None = None, **given: Any) -> dict[str, torch.Tensor]:
    """The weights that the processes leave."""
    folder.mkdir()
    defaults = {"recipe": str(RECIPE), "settings": SETTINGS, "samples": SAMPLES, "fp16": False}
    content = {**defaults, "kill_at": -1, "pause_s": 0.0, **given}
    (settings := folder / "settings.json").write_text(json.dumps(content))
    variables = {**os.environ, "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    variables |= {"HOROVOD_FUSION_THRESHOLD": str(fusion)} if fusion is not None else {}
    variables.pop("PYTHONPATH", None)
    command = [*launch, "python", str(PROGRAM), str(settings)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return weights


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def batches_used(folder: Path) -> list[dict[str, Any]]:
    """Samples and learning rate of each step that counts: of what was tried several times, the last."""
    tried = [json.loads(line) for line in (folder / "used.jsonl").read_text().splitlines()]
    batches = []
    for made in json.loads((folder / "log.json").read_text()):
        shares = [one["samples"] for one in tried if one["step"] == made["step"]][-made["processes"] :]
        batches.append({**made, "samples": sorted(sample for share in shares for sample in share)})
    return batches


def epochs_of(batches: list[dict[str, Any]]) -> list[list[int]]:
    """Samples by epoch: an epoch ends where its samples have all been used."""
    epochs: list[list[int]] = [[]]
    for batch in batches:
        if len(set(epochs[-1])) == SAMPLES:
            epochs.append([])
        epochs[-1] += batch["samples"]
    return epochs


def test_two_processes_give_the_weights_of_one(tmp_path: Path) -> None:
    weights = run(tmp_path / "two", "horovodrun", "-np", "2")
    batches = batches_used(tmp_path / "two")
    order = list(range(SAMPLES))
    random.Random(3).shuffle(order)
    assert batches[0]["samples"] == sorted(order[: 2 * MICRO_BATCH])
    assert [batch["processes"] for batch in batches] == [2] * STEPS
    assert max(batch["learning_rate"] for batch in batches) == 2 * SETTINGS["learning_rate"]  # type: ignore[operator]
    alone = run(tmp_path / "one", batches=batches)
    assert difference(weights, alone) < 1e-6
    assert difference(weights, run(tmp_path / "start", batches=[])) > 1e-3, "it learns something"

    assert difference(run(tmp_path / "unfused", "horovodrun", "-np", "2", fusion=0), alone) < 1e-6
    assert 0 < difference(run(tmp_path / "fp16", "horovodrun", "-np", "2", fp16=True), alone) < 1e-2


def test_one_of_three_is_lost_two_go_on_and_one_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    launch = ["python", str(RECIPE / "elastic.py"), "--least", "2", "--replace-after-s", "20"]
    settings = {**SETTINGS, "steps": 150}
    folder = tmp_path / "elastic"
    weights = run(folder, *launch, settings=settings, kill_at=7, pause_s=1.0)
    batches = batches_used(folder)
    counts = [batch["processes"] for batch in batches]
    changes = [count for number, count in enumerate(counts) if number == 0 or count != counts[number - 1]]
    assert [batch["step"] for batch in batches] == list(range(1, 151))
    assert changes == [3, 2, 3], counts
    *epochs, _ = epochs_of(batches)
    assert len(epochs) > 2
    for epoch in epochs:  # each once; Horovod's sampler fills the last batch up with less than one sample a process
        assert set(epoch) == set(range(SAMPLES)) and len(epoch) < SAMPLES + 3
    assert difference(weights, run(tmp_path / "one", batches=batches)) < 1e-6
