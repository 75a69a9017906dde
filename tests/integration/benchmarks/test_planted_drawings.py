"""Planted faults are named: copies and wrong labels of digits, contradictions and a shared page of easy-vqa."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.data.copies.planted_faults import KINDS, plant
from benchmarks.evaluation.audit_faults import copied_pairs, wrong_labels
from tests.support.data.prepared import encode, job_config, run_prepare, write_json
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.findings import Kind
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader

DRAWINGS, CONTRADICTED, PAGES = 40, (3, 9, 20), 24
DIGITS, UNSEEN = 240, 1000  # thresholds were chosen on the first 1,000


class Patches:
    """Features of stored images as the tower of the shipped digits makes them: a random projection of each patch."""

    def __init__(self, uri: str) -> None:
        self.shards = SimpleNamespace(missing=lambda images: [])
        self._places, self._stored = Index.load(uri).unique_images(), ShardReader.open(open_prepared(uri))
        self._projection = torch.randn(32 * 32, 128, generator=torch.Generator().manual_seed(0))

    def read(self, sha256: str) -> torch.Tensor:
        with Image.open(io.BytesIO(self._stored.image(self._places[sha256]))) as image:
            pixels = torch.from_numpy(np.asarray(image.convert("L").resize((64, 64)), np.float32) / 255)
        patches = pixels.unfold(0, 32, 32).unfold(1, 32, 32).reshape(4, -1)
        return patches @ self._projection


def test_planted_copies_and_wrong_labels_of_digits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant("builtin:digits", tmp_path, DIGITS, seed=1, skipped=UNSEEN)
    images = str(tmp_path / "images")
    job = job_config(tmp_path / "root", source=str(planted.records), image_folder=images, max_split_error=1.0)
    uri = run_prepare(job).uri
    monkeypatch.setattr("vlmpipe.trainer.audit.audit._features", lambda *_: Patches(uri))
    found, _ = audit(AuditRequest(job, uri, has_run=False))
    copies, missed = copied_pairs(planted, found)
    assert {kind for kind, _ in planted.copies.values()} == KINDS.keys() and not missed
    assert copies.precision >= 0.75
    labels = wrong_labels(planted, found)
    assert labels.recall >= 0.75 and labels.precision >= 0.6


def test_planted_contradictions_and_a_shared_page_are_found(tmp_path: Path) -> None:
    planted = plant("builtin:easy-vqa", tmp_path, DRAWINGS)
    images = tmp_path / "images"
    told = json.loads(planted.records.read_text(encoding="utf-8"))
    clean = [row for row in told if row["id"] not in planted.wrong and row["id"] not in planted.copies]
    for row in clean:
        row["split"] = "eval" if row["id"].endswith("7") else "train"
    chosen = [clean[place] for place in CONTRADICTED]
    for number, row in enumerate(chosen):
        with Image.open(images / row["image"]) as image:
            (images / f"again-{number}.jpg").write_bytes(encode(image.convert("RGB"), "JPEG", quality=70))
        talk = [row["conversations"][0], {"from": "gpt", "value": "a hole"}]
        row["split"] = "train"
        clean.append({"id": f"again-{number}", "image": f"again-{number}.jpg", "conversations": talk, "split": "train"})
    page = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(page, "PNG")
    (images / "page.png").write_bytes(page.getvalue())
    for number in range(PAGES):
        talk = [{"from": "human", "value": f"<image>\nWhat is on page {number}?"}, {"from": "gpt", "value": "Nothing."}]
        clean.append({"id": f"page-{number}", "image": "page.png", "conversations": talk, "split": "train"})
    source = write_json(tmp_path / "faults.json", clean)
    job = job_config(tmp_path / "root", source=str(source), image_folder=str(images), max_split_error=1.0)
    found, _ = audit(AuditRequest(job, run_prepare(job).uri, has_run=False))

    def ids(kind: Kind) -> set[str]:
        return {flag.id for flag in found.finding(kind).flagged}

    assert ids("contradiction") == {row["id"] for row in chosen} | {f"again-{number}" for number in range(3)}
    pages = {f"page-{number}" for number in range(PAGES)}
    assert found.finding("shared_image").samples == PAGES and ids("shared_image") <= pages
    assert ids("blank_image") == pages
