"""What an export and a resume read of a checkpoint in a bucket, and what they leave and hold on the disk.

The model is a small one in which, as in a large one, nearly all bytes are those of matrices.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import SAFE_WEIGHTS_NAME

from tests.fakes.gcs.server import FakeGcs
from tests.support.short_form import chosen
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.runs import make_run, run_ranks, train_runs
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import MARKER
from vlmpipe.trainer.storage.file_sums import files_below
from vlmpipe.trainer.storage.model_folders import WEIGHTS

NODES = 2  # of one process
LANGUAGE = "model.language_model.config"
WIDE = {f"{LANGUAGE}.hidden_size": 128, f"{LANGUAGE}.intermediate_size": 2048, f"{LANGUAGE}.num_hidden_layers": 1}
ONCE: dict[str, Any] = {"train.max_steps": 1, "train.global_batch_size": 4, "features.cache": "off", **WIDE}
LORA = {"model.lora": {"rank": 256}}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"train.strategy": "fsdp"},
    "ddp, averaged": {"train.strategy": "ddp", "train.ema_decay": 0.5},
    "zero2": {"train.strategy": "zero2"},
    "zero3": {"train.strategy": "zero3"},
    "zero3, averaged": {"train.strategy": "zero3", "train.ema_decay": 0.5},
    "zero1, bf16": {"train.strategy": "zero1", "train.precision": "bf16"},
    "fsdp, adapters": {"train.strategy": "fsdp", **LORA},
}
TRIED = chosen(CASES, lambda name: name in ("fsdp", "zero2"))
RESUMED = chosen(TRIED, lambda name: name == "fsdp")
# Least and most that one of two nodes reads of a checkpoint, with what is rounded; elsewhere it is half of it.
SHARES = {"ddp": (0.95, 1.1), "zero1": (0.5, 0.75), "zero2": (0.5, 0.75)}
MAX_READ = 1.1  # times the bytes of the trained weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("runs")
    jobs = {name: make_run(root, name.replace(", ", "-"), ONCE | CASES[name], features="off") for name in TRIED}
    train_runs(list(jobs.values()), processes=1, nodes=NODES)
    return jobs


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
        yield server


def uploaded(job: JobConfig, **train: Any) -> JobConfig:
    """The same run in the bucket, with changes of its `train` section."""
    content = job.model_dump(mode="json")
    content["run"]["root_uri"] = "gs://bucket"
    content["train"] |= train
    store = open_storage(f"gs://bucket/runs/{job.run.run_id}")
    for name, path in files_below(Path(job.run.run_uri)).items():
        store.upload(path, name)
    store.write("run.json", json.dumps(content).encode())
    return JobConfig.load(store.uri("run.json"))


def read_of(server: FakeGcs) -> int:
    """Bytes that were downloaded of checkpoints."""
    return sum(size for name, size in server.downloads if "/checkpoints/" in name)


def weights_bytes(job: JobConfig) -> int:
    return sum(weight.nbytes for weight in trained_weights(job).values())


def sizes_at_uploads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes that lie in the folder at each upload from now on."""
    on_disk: list[int] = []
    kind = type(open_storage("gs://bucket"))
    upload = kind.upload

    def measured(*arguments: Any, **options: Any) -> None:
        on_disk.append(sum(path.stat().st_size for path in files_below(folder).values()))
        upload(*arguments, **options)

    monkeypatch.setattr(kind, "upload", measured)
    return on_disk


@pytest.mark.parametrize("name", TRIED)
def test_an_export_reads_the_trained_weights_alone(
    name: str, runs: dict[str, JobConfig], bucket: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = uploaded(runs[name])
    on_disk = sizes_at_uploads(tmp_path, monkeypatch)
    described = sync_run(job)
    read, weights = read_of(bucket), weights_bytes(runs[name])
    assert weights < read <= MAX_READ * weights
    assert max(on_disk) <= max(file["bytes"] for file in described["files"].values()) + 100_000
    assert described["averaged"] == ("averaged" in name)
    assert described["weights_sha256"] == sync_run(runs[name])["weights_sha256"]


def test_a_base_in_a_bucket_is_merged_without_a_copy_of_its_files(
    runs: dict[str, JobConfig],
    bucket: FakeGcs,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And gives the weights that an export gives from files on its disk."""
    sync_run(runs["fsdp"])
    whole, published = Path(runs["fsdp"].run.run_uri, "export"), tmp_path_factory.mktemp("published")
    model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.bfloat16)
    model.save_pretrained(published, max_shard_size="200KB")
    store = open_storage("gs://bucket/base")
    for name, path in (files_below(whole) | files_below(published)).items():
        if name not in (MARKER, SAFE_WEIGHTS_NAME):
            store.upload(path, name)
    base_bytes = sum(path.stat().st_size for name, path in files_below(published).items() if name.endswith(WEIGHTS))
    base = {"pretrained": {"weights": store.root_uri}, "tokenizer": store.root_uri, "image_size": 32}
    changes = {name: value for name, value in ONCE.items() if name not in WIDE}
    root = tmp_path_factory.mktemp("on-base")
    trained = make_run(root, "adapters", changes | {"model": base | {"lora": {"rank": 4}}}, features="off")
    train_runs([trained], processes=1)
    shutil.rmtree(tmp_path / "cache")  # the training's
    bucket.downloads.clear()
    on_disk = sizes_at_uploads(tmp_path, monkeypatch)
    described = sync_run(uploaded(trained))
    read = sum(size for name, size in bucket.downloads if name.startswith("base/") and name.endswith(WEIGHTS))
    assert 1.9 * base_bytes < read < 2.1 * base_bytes, "for the digest, and to merge"
    assert max(on_disk) <= max(file["bytes"] for file in described["files"].values()) + 100_000
    assert not [name for name in files_below(tmp_path / "cache") if name.endswith(WEIGHTS)]
    checkpoint, _ = newest_good(open_storage(trained.run.run_uri))
    assert checkpoint
    from_disk = export_checkpoint.__wrapped__(trained, open_storage(trained.run.run_uri), checkpoint, [])  # type: ignore[attr-defined]
    assert [name for name in files_below(tmp_path / "cache") if name.endswith(WEIGHTS)]
    assert described["weights_sha256"] == from_disk["weights_sha256"]


def test_a_resume_reads_what_each_node_needs_and_leaves_nothing(
    runs: dict[str, JobConfig], bucket: FakeGcs, tmp_path: Path
) -> None:
    """And goes on as a run that was not interrupted."""
    jobs = {name: uploaded(runs[name], max_steps=2) for name in RESUMED}
    straight = {
        name: make_run(tmp_path, name.replace(", ", "-"), ONCE | CASES[name] | {"train.max_steps": 2}, features="off")
        for name in RESUMED
    }
    whole = {}
    for job in jobs.values():
        store = open_storage(job.run.run_uri)
        (saved,) = committed(store)
        size_bytes = sum(info.size_bytes for info in store.list(f"checkpoints/{saved}"))
        whole[saved] = (job.train.strategy, size_bytes)
    bucket.downloads.clear()
    configs = [f"{job.run.run_uri}/run.json" for job in (*jobs.values(), *straight.values())]
    said = run_ranks("tests.support.drivers.train_many", ["--configs", *configs], processes=1, nodes=NODES)
    for saved, (strategy, size_bytes) in whole.items():
        least, most = SHARES.get(strategy, (0.45, 0.55))
        found = re.search(rf"node 0 reads ([\d,]+) of the ([\d,]+) bytes of {saved}", said)
        assert found and least < int(found[1].replace(",", "")) / size_bytes < most, said
        read = sum(size for file, size in bucket.downloads if f"/{saved}/" in file)
        assert read < NODES * most * size_bytes, "of both nodes, with what is read to plan it"
    assert not list((tmp_path / "scratch").iterdir()) and not files_below(tmp_path / "cache")
    for name, job in jobs.items():
        resumed, expected = trained_weights(job), trained_weights(straight[name])
        assert all(torch.equal(weight, expected[of]) for of, weight in resumed.items())
