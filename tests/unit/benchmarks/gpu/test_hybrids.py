"""What `make bench-gpu args='--only hybrids'` measures on a GPU runs at tiny sizes on a processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import hybrids
from benchmarks.support.progress import Progress
from benchmarks.support.report import Report
from benchmarks.support.suite import Bench
from vlmpipe.trainer.preflight import delta_rules


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    progress = Progress(1)
    progress.begin("hybrids", 1, 1)
    made = Bench(Report("a test"), tmp_path, progress, 1, quick=True)
    vars(made)["worker"] = SimpleNamespace(device=torch.device("cpu"))
    return made


@pytest.mark.parametrize(
    "duels", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["hybrid", "duel of layers too"]
)
def test_each_arm_gives_its_figures(duels: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrids, "PASSES", 1)
    if not duels:  # which compiles a layer: seconds
        monkeypatch.setattr(hybrids, "_duel", lambda *_: None)
    hybrids.hybrids(bench)
    assert [(row.claim, row.ours_label, row.baseline_label) for row in bench.report.rows] == [
        ("hybrid: useful tokens", "packed", "one sample a sequence"),
        ("dense layers: useful tokens", "compiled", "eager"),
    ][: 1 + duels]
    assert [answer.ours for answer in bench.report.answers] == ["right"]
    (kept,) = bench.report.predictions
    assert kept.predicted == kept.measured > 0
    assert not duels or any("liger is left out" in note for note in bench.report.notes)


def test_a_wrong_kernel_fails_the_part(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rules, "faults_of", lambda *_: ["the gradient of decay differs"])
    model = hybrids._hybrid(hybrids.TINY)
    (rule,) = delta_rules.rules_in(model)
    with pytest.raises(RuntimeError, match="gradient of decay"):
        hybrids._rightness(bench, rule)
