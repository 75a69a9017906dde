"""Two runs of a schedule in a row: records are added between them, and only what is new is prepared and encoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.chunks import fixed_tokenizer
from tests.support.data.prepared import conversation, llava_folder, record, write_json
from tests.support.paths import ROOT
from tests.support.trainer.runs import run_ranks, train_runs
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.registry.folder import FolderRegistry
from vlmpipe.registry.release import decide_run, point_to_champion, register_run
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

BEFORE, AFTER = 60, 80  # records
CHUNK = 16  # records


def add_data(folder: Path, count: int) -> Path:
    """A LLaVA file of `count` records; those of an earlier, smaller one stay as they are."""
    images = folder / "images"
    if not images.exists():
        llava_folder(folder, AFTER)
    said = [record(n, conversations=conversation("<image>\nWhich one?", f"Number {n % 4}.")) for n in range(count)]
    return write_json(folder / "llava.json", said)


def content(run_uri: str, name: str) -> dict[str, Any]:
    return dict(json.loads(open_storage(run_uri).read(name)))


def splits(job_or_run: str) -> dict[str, str]:
    """The split of each sample of a run."""
    index = Index.load(content(job_or_run, "prepared.json")["prepared_uri"])
    return {identity: name for name in ("train", "eval") for identity in index.split(name).ids}


def require_second_run_is_only_what_is_new(first: str, second: str, *, chunks: bool) -> None:
    """The laws of retraining, from what two runs have written."""
    found = content(second, "data_changes.json")
    changes = found["changes"]
    assert (changes["same"], changes["new"], changes["changed"], changes["gone"], changes["moved"]) == (
        BEFORE, AFTER - BEFORE, 0, 0, 0,
    )  # fmt: skip
    if chunks:
        assert 0 < found["chunks"]["prepared"] < found["chunks"]["total"]
    before, after = splits(first), splits(second)
    assert {identity: after[identity] for identity in before} == before
    encoded = [content(run, "steps/cache-features.json")["total"] for run in (first, second)]
    assert encoded == [BEFORE, AFTER - BEFORE]
    held_out = sum(split == "eval" for split in before.values())
    assert held_out < sum(split == "eval" for split in after.values()), "the validation questions have grown, too"
    decision = content(second, "decision.json")
    (comparison,) = (check for check in decision["checks"] if check["name"] == "no regression")
    assert decision["champion"]["version"] == 1
    champion = content(second, "evaluate.json")["champion"]
    assert champion["questions"] == comparison["questions"], "the champion is asked in the same job"
    assert champion["questions"] == content(second, "evaluate.json")["questions"] > held_out, "also what is new"
    assert champion["in_its_training"] == 0 and champion["run_id"] == decision["champion"]["run_id"]
    assert comparison["threshold"] is not None and decision["reason"]


# Of models that have learned nothing: what is looked at is the comparison.
GATE = {
    "max_regression": 1.0,
    "min_margin_over_chance": None,
    "min_margin_over_shuffled_image": None,
    "max_loss": 100.0,
    "min_questions": 1,
}


def carry_out(root: Path, run_id: str, data: Path, **gate: Any) -> str:
    """The pipeline's steps on this data, one after the other here; ranks are forked. Returns the run's URI."""
    changes = {
        "data": {**TINY["data"], "source": str(data), "image_folder": str(data.parent / "images"), "max_samples": 0},
        "data.chunk_samples": CHUNK, "model.tokenizer": fixed_tokenizer(root / "tokenizer"),
        "data.validation_fraction": 0.2,
        "train.epochs": 1, "gate": GATE | gate, "register": {"model_name": "", "alias": "champion"},
        "run": {"run_id": run_id, "root_uri": str(root)},
    }  # fmt: skip
    store = open_storage(str(root / "runs" / run_id))
    store.write("run.json", json.dumps(merged(TINY, changes)).encode())
    job = JobConfig.load(store.uri("run.json"))
    pointers, _ = prepare_run(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
    assert pointers.features == "encode"
    for module in ("vlmpipe.trainer.feature_cache.encode", None, "vlmpipe.trainer.evaluation.evaluate"):
        if module:
            run_ranks(module, ["--config", store.uri("run.json")], processes=1)
        else:
            train_runs([job], processes=1)
            sync_run(job)
            point_to_champion(job.run.run_uri)
    decide_run(job.run.run_uri)
    return job.run.run_uri


def test_the_second_run_processes_new_samples_only_and_is_compared_with_the_champion(tmp_path: Path) -> None:
    root, data = tmp_path / "out", tmp_path / "data"
    first = carry_out(root, "monday", add_data(data, BEFORE))
    assert content(first, "decision.json")["accepted"] and content(first, "data_changes.json")["changes"] is None
    assert register_run(first).version == 1
    second = carry_out(root, "tuesday", add_data(data, AFTER))
    require_second_run_is_only_what_is_new(first, second, chunks=True)
    assert content(second, "decision.json")["accepted"]
    assert register_run(second).version == 2
    champion = FolderRegistry(str(root / "registry")).champion("tiny")
    assert champion and champion.run_id == "tuesday"
    third = carry_out_gate_alone(second, min_exact_match=1.0)
    assert not third["accepted"] and third["reason"].startswith("Rejected: exact match")


def carry_out_gate_alone(run_uri: str, **gate: Any) -> dict[str, Any]:
    """The decision about the same run under another gate."""
    store = open_storage(run_uri)
    settings = content(run_uri, "run.json")
    write_record(store, "run.json", settings | {"gate": GATE | gate | {"max_regression": None}})
    decide_run(run_uri)
    return content(run_uri, "decision.json")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_same_through_vlmpipe_run(tmp_path: Path) -> None:
    root, runs = tmp_path / "out", []
    for count in (BEFORE, AFTER):
        source = add_data(tmp_path / "data", count)
        settings = [
            f"data.source={source}", f"data.image_folder={source.parent / 'images'}", f"output.root_uri={root}",
            "data.validation_fraction=0.2", "train.max_steps=4", f"gate={json.dumps(GATE)}",
            "model.tokenizer=train:300",
        ]  # fmt: skip
        command = [sys.executable, "-m", "vlmpipe.cli.app", "run", "configs/llava-local.yaml", "--fresh", *settings]
        before = set(root.glob("runs/*"))
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (run,) = set(root.glob("runs/*")) - before
        runs.append(str(run))
    require_second_run_is_only_what_is_new(*runs, chunks=False)
    assert content(runs[1], "registered.json")["version"] == 2
