"""Part `audit-faults`: recall and precision of `vlmpipe data audit` on planted copies and wrong labels of three sets.

Each set is trained by `vlmpipe run` and audited by `vlmpipe data audit`: the run, and the run file alone.
Thresholds of the audit were chosen on the first samples of each set's order; those are skipped here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from benchmarks.data.copies.planted_faults import KINDS, Planted, plant
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.trainer.audit.findings import Audit
from vlmpipe.trainer.storage import open_storage

CONFIGS = Path(__file__).parents[2] / "configs"
SEED = 1  # of what is planted; thresholds were chosen with seed 0
RUN = "planted"


@dataclass(frozen=True)
class Drawn:
    """samples: at most. skipped: samples on which thresholds were chosen. every: steps between checkpoints."""

    samples: int
    skipped: int
    epochs: int
    every: int


SETS = {
    "digits": Drawn(1000, 1000, 8, 60),  # 797 are left
    "easy-vqa": Drawn(1000, 1000, 12, 150),
    "openmoji": Drawn(800, 800, 12, 150),  # 663 are left
}
QUICK = {"digits": Drawn(200, 1000, 4, 20)}


@dataclass(frozen=True)
class Found:
    """planted: faults. named: what the audit names. right: what is both."""

    planted: int
    named: int
    right: int

    @property
    def recall(self) -> float:
        return self.right / max(1, self.planted)

    @property
    def precision(self) -> float:
        """1 where nothing is named."""
        return self.right / self.named if self.named else 1.0


def audit_faults(bench: Bench) -> None:
    """Some ten minutes of CPU time. No figure is a time."""
    sets = QUICK if bench.quick else SETS
    bench.expect(len(sets))
    for name, drawn in sets.items():
        bench.at(name)
        with bench.going_on(name):
            files = Files(name, drawn, bench.scratch / name)
            files.train()
            of_run, of_file = files.audit(RUN), files.audit(str(files.run_file))
            _report(bench, name, files.planted, of_run, of_file)


def wrong_labels(planted: Planted, audit: Audit) -> Found:
    """Suspected labels against samples with a wrong one, copies of such samples included."""
    wrong = planted.wrong | {copy for copy, (_, of) in planted.copies.items() if of in planted.wrong}
    named = {flag.id for flag in audit.finding("suspected_label").flagged}
    return Found(len(wrong), len(named), len(wrong & named))


def copied_pairs(planted: Planted, audit: Audit) -> tuple[Found, Counter[str]]:
    """Pairs of one group of near duplicates against the planted ones; and the kinds of those missed."""
    true = {frozenset((copy, of)): kind for copy, (kind, of) in planted.copies.items()}
    named = set(_pairs(audit))
    missed = Counter(true[pair] for pair in true.keys() - named)
    return Found(len(true), len(named), len(true.keys() & named)), missed


def _pairs(audit: Audit) -> Iterator[frozenset[str]]:
    flagged = sorted(audit.finding("near_duplicate").flagged, key=lambda flag: flag.group)
    for _, members in groupby(flagged, key=lambda flag: flag.group):
        yield from map(frozenset, combinations((flag.id for flag in members), 2))


class Files:
    """A set with planted faults, the run file that trains on it, and its audits."""

    def __init__(self, name: str, drawn: Drawn, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.run_file = folder, folder / "planted.yaml"
        self.planted = plant(f"builtin:{name}", folder / "set", drawn.samples, SEED, drawn.skipped)
        content: dict[str, Any] = read_run_file(CONFIGS / f"{name}.yaml")
        content["data"] = {"source": str(self.planted.records), "image_folder": str(folder / "set" / "images")}
        content["data"] |= {"sequence_length": 96}
        content["train"] |= {"epochs": drawn.epochs, "validate_every_steps": 0}
        content["train"] |= {"checkpoint_every_steps": drawn.every, "keep_checkpoints": 20}
        content["evaluate"] = {"max_new_tokens": 4, "max_samples": 20, "controls": []}
        content |= {"gate": "none", "output": {"root_uri": str(folder / "root")}}
        content["cluster"] = {"replica_count": 1, "processes_per_replica": 1}
        self.run_file.write_text(json.dumps(content), encoding="utf-8")  # which is YAML, too

    def train(self) -> None:
        """Run the run file to its end. Raises CalledProcessError with what it printed."""
        _command("run", str(self.run_file), "--run-id", RUN, "--plain")

    def audit(self, audited: str) -> Audit:
        """The audit of a run, or of a run file."""
        output = self._folder / ("of-file" if audited == str(self.run_file) else "of-run")
        _command("data", "audit", audited, "--root", str(self._folder / "root"), "--output", str(output))
        return Audit.require(open_storage(str(output)))


def _command(*arguments: str) -> None:
    command = [sys.executable, "-m", "vlmpipe", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
    ended.check_returncode()


def _report(bench: Bench, name: str, planted: Planted, of_run: Audit, of_file: Audit) -> None:
    pairs, missed = copied_pairs(planted, of_run)
    kinds = Counter(kind for kind, _ in planted.copies.values())
    data = f"{name}, {of_run.images:,} images, {pairs.planted} copies, {pairs.named} pairs named"
    _figures(bench, "copies", data, "audit of the run", pairs)
    for kind in KINDS:
        share = 1 - missed[kind] / max(1, kinds[kind])
        bench.report.figure(f"copies: {kind}, recall", f"{name}, {kinds[kind]}", "share", Side("audit", [share]))
    steps = " and ".join(map(str, of_run.checkpoint_steps))
    for audit, label in ((of_run, f"losses at step {steps}"), (of_file, "no run")):
        labels = wrong_labels(planted, audit)
        data = f"{name}, {planted.samples:,} samples, {labels.planted} wrong, {labels.named} named"
        _figures(bench, "wrong labels", data, label, labels)
    bench.report.note(f"{name}: {of_run.finding('suspected_label').obstacle or 'all answers were judged'}")


def _figures(bench: Bench, what: str, data: str, label: str, score: Found) -> None:
    bench.report.figure(f"{what}, recall", data, "share", Side(label, [score.recall]))
    if score.named:
        bench.report.figure(f"{what}, precision", data, "share", Side(label, [score.precision]))
