"""Statistics of prepared data by source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.data.prepared import conversation, job_config, llava_folder, run_prepare
from vlmpipe.trainer.data.prepare.overview import Shared, overview


def test_sources_with_what_they_share(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 6)
    german = [{"conversations": conversation(f"Was ist {n} und {n}?", "Das ist eine Zahl.")} for n in range(12)]
    files: dict[str, list[dict[str, Any]]] = {
        "a": [*records, records[0] | {"id": "again"}],  # a sample twice
        "b": [records[0], records[1] | {"conversations": conversation("<image>\nWhat is in it?", "It is noise.")}],
        "c": german,
    }
    sources = []
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(one | {"split": "train"}) for one in content))
        sources.append({"name": name, "uri": str(tmp_path / f"{name}.jsonl"), "weight": 1.0})
        sources[-1] |= {"image_folder": str(images)} if name != "c" else {}
    held_out = {"name": "d", "uri": str(tmp_path / "d.jsonl"), "weight": 1.0}
    rest = [{"conversations": conversation("42?", "43"), "split": split, "id": split} for split in ("train", "eval")]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rest)))
    config = job_config(tmp_path / "root", sources=[*sources, held_out], stopping_strategy="first_exhausted")
    found = overview(run_prepare(config).uri, config.data)

    by_name = {one.name: one for one in found.sources}
    assert {name: (one.samples, one.train_samples) for name, one in by_name.items()} == {
        "a": (7, 7), "b": (2, 2), "c": (12, 12), "d": (2, 1)
    }  # fmt: skip
    assert by_name["a"].images.tolist()[:3] == [0, 7, 0] and by_name["c"].images[0] == 12
    assert found.shared == (Shared("a", "a", 1, 1), Shared("a", "b", 1, 2), Shared("d", "d", 1, 0))
    # The epoch ends with d's single training sample, so one of each is drawn.
    assert by_name["c"].epoch_tokens == by_name["c"].train_tokens / 12 and by_name["c"].tokens > 100


def test_a_single_source(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 4)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = job_config(tmp_path / "root", source=str(tmp_path / "data.jsonl"), image_folder=str(images), split_by="id")
    (only,) = overview(run_prepare(config).uri, config.data).sources
    assert only.samples == 4 and only.epoch_tokens == only.train_tokens
