"""Contradictions and a page that far more questions share than the rest, planted into drawings of easy-vqa."""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image

from benchmarks.data.copies.planted_faults import plant
from tests.support.data.prepared import encode, job_config, run_prepare, write_json
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.findings import Kind

DRAWINGS, CONTRADICTED, PAGES = 40, (3, 9, 20), 24


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
