"""The how-to page on one's own data, typed in as it stands: every set that it makes is one that `check` accepts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.commands import FENCE
from tests.support.data.prepared import job_config, run_prepare
from tests.support.paths import ROOT
from vlmpipe.cli.app import app
from vlmpipe.config.run_config import load_run_file, parse_run_config

PAGE = ROOT / "docs" / "how-to" / "bring-your-own-data.md"


@pytest.mark.e2e
def test_every_set_on_the_page_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    checked = []
    for language, body in FENCE.findall(PAGE.read_text()):
        if language == "python":
            exec(compile(body, str(PAGE), "exec"), {"__name__": "page"})
            continue
        if language == "yaml":  # images of the web, which no test asks, and several sources
            content = load_run_file(ROOT / "configs/llava-local.yaml").to_dict()
            said = yaml.safe_load(body)
            if "model" in said:  # starts from a run that is not there: tests/unit/trainer/data/test_mixture.py reads it
                continue
            instead = {"source", "image_folder", *said["data"]} if "sources" in said["data"] else {"image_folder"}
            kept = {name: value for name, value in content["data"].items() if name not in instead}
            parse_run_config({**content, "data": {**kept, **said["data"]}}, "the page")
            continue
        program, verb, *arguments = shlex.split(body)
        assert program == "vlmpipe"
        if verb in ("run", "data"):  # the tutorial's test and the audit's own
            continue
        answer = CliRunner().invoke(app, [verb, *arguments])
        assert answer.exit_code == 0, answer.output
        data = load_run_file(ROOT / arguments[0], arguments[1:]).data
        prepared = run_prepare(
            job_config(tmp_path / "root", source=data.source, image_folder=data.image_folder, columns=data.columns)
        )
        checked.append((data.source, prepared.counts["accepted"], prepared.counts["rejected"]))
    assert checked == [
        ("llava.json", 20, 0),
        ("tars/train-{000000..000001}.tar", 20, 0),
        ("parquet", 20, 0),
        ("columns", 20, 0),
        ("captions.json", 40, 0),
        ("pictures", 20, 0),
    ]
