"""`vlmpipe data inspect` shows samples as preparation makes them; `data export` writes them for other trainers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.data.prepared import conversation, llava_folder, record, run_prepare, write_json
from tests.support.pipelines.run_files import SMALL
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, with_template
from vlmpipe.cli.app import app
from vlmpipe.cli.data import _job
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.runs.folders.marker import MARKER, Marker
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

SPLITS = ("eval", "train", "train")


def run_file(folder: Path, template: str, **changes: Any) -> str:
    """A run file with three samples: good, with an image in its answer, and with a control token in its text."""
    images, _ = llava_folder(folder, 3)
    records = [
        record(0),
        record(1, conversations=conversation("Show it.", "Here: <image>\nand there.")),
        record(2, conversations=conversation("<image> <|end|>", "A picture.")),
    ]
    with_template(template, image="<image>").save_pretrained(folder / "tokenizer")
    data = {
        "model.tokenizer": str(folder / "tokenizer"),
        "data.source": str(write_json(folder / "data.json", records)),
        "data.image_folder": str(images),
        "data.chat_template": "native",
        "output": {"root_uri": str(folder / "root")},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(apply_overrides(SMALL, data | changes)))
    return str(path)


def inspect(path: str, *options: str) -> str:
    result = CliRunner().invoke(app, ["data", "inspect", path, *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_labels_and_rejects_are_shown(tmp_path: Path) -> None:
    path = run_file(tmp_path, PLAIN.replace("<|image_pad|>", "<image>"))
    shown = inspect(path)
    assert "<|turn|>assistant\n[A picture.<|end|>]" in shown and "[Number 0.<|end|>]" in shown
    assert "<image> x 4<|vision_end|>What is this?" in shown
    assert "[Here: ]<|vision_start|><image> x 4<|vision_end|>[and there.<|end|>]" in shown
    assert "text.special_token: turn 1 spells the control token '<|end|>'" in shown
    (sample,) = json.loads(inspect(path, "--json", "--first", "1", "--count", "1"))["samples"]
    assert sample["id"] == "sample-1" and len(sample["labels"]) == len(sample["input_ids"])
    assert sum(piece["tokens"] for piece in sample["pieces"]) == len(sample["input_ids"])
    assert [piece["text"] for piece in sample["pieces"] if piece["is_label"]] == ["Here: ", "and there.<|end|>"]


def test_the_page_shows_pictures_labels_and_statistics(tmp_path: Path) -> None:
    path = run_file(tmp_path, PLAIN.replace("<|image_pad|>", "<image>"))
    page = tmp_path / "page.html"
    assert str(page) in inspect(path, "--html", str(page))
    early = page.read_text()
    assert early.count('src="data:image/png;base64,') == 2 and "Statistics follow once the data is prepared" in early
    assert '<span class="image">&lt;image&gt; × 4</span>' in early and ">Number 0.&lt;|end|&gt;</span>" in early
    assert "Left out: text.special_token: turn 1 spells the control token &#39;&lt;|end|&gt;&#39;" in early

    records = json.loads((tmp_path / "data.json").read_text())
    write_json(tmp_path / "data.json", [one | {"split": split} for one, split in zip(records, SPLITS, strict=True)])
    inspect(path, "data.max_reject_fraction=0.5", "--prepare", "--html", str(page))
    whole = page.read_text()
    assert "Share of an epoch" in whole
    assert not re.search(r"<script|https?://", whole)


def test_what_the_template_refuses_is_shown(tmp_path: Path) -> None:
    template = TEMPLATES["no images in answers"].replace("<|image_pad|>", "<image>")
    shown = inspect(run_file(tmp_path, template), "--first", "1")
    assert "conv.template: the chat template writes 0 images of 1: those in answers" in shown.replace("\n", " ")


def test_a_tokenizer_that_is_not_trained_yet_is_named(tmp_path: Path) -> None:
    path = run_file(tmp_path, PLAIN, **{"model.tokenizer": "train:300", "data.chat_template": ""})
    with pytest.raises(UserError, match="this data is not prepared yet") as caught:
        inspect(path)
    assert caught.value.code == ExitCode.NOT_FOUND


def export(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["data", "export", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_run_and_its_run_file_export_the_same_data(tmp_path: Path) -> None:
    records = [record(n) | {"split": ("train", "eval")[n % 2]} for n in range(3)]
    path = run_file(tmp_path, PLAIN.replace("<|image_pad|>", "<image>"))
    write_json(tmp_path / "data.json", records)
    with pytest.raises(UserError, match="not prepared yet"):
        export(path, "--format", "messages", "--output", str(tmp_path / "early"))
    prepared = run_prepare(_job(Path(path), None, ""))
    run = LocalStorage(tmp_path / "root" / "runs" / "one")
    write_record(run, MARKER, asdict(Marker("one", config_digest="", arguments=(path,), started_s=0.0)))
    write_record(run, "prepared.json", {"prepared_uri": prepared.uri, "features_uri": "", "features": "off"})

    found = json.loads(export(path, "--format", "llava", "--output", str(tmp_path / "a"), "--json"))
    assert found["samples"] == {"train": 2, "validation": 1} and found["files"]["train"] == ["train.json"]
    shown = export("one", "--root", str(tmp_path / "root"), "--format", "llava", "--output", str(tmp_path / "b"))
    assert "2 of train, 1 of validation; 3 images" in " ".join(shown.split())
    assert (tmp_path / "a" / "train.json").read_bytes() == (tmp_path / "b" / "train.json").read_bytes()
