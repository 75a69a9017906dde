from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Vlmpipe
from tests.support.guide_page import PAGE, guide_page
from tests.support.guides.deepspeed import DEEPSPEED
from tests.support.guides.listings import LISTINGS


def test_the_run_file_is_printed_or_written_once(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    source, output = tmp_path / "ds_config.json", tmp_path / "my-run.yaml"
    source.write_text(json.dumps(DEEPSPEED["A2.2-zero2"]))
    printed = vlmpipe("import", str(source))
    assert (printed.code, printed.err) == (0, "")
    written = vlmpipe("import", str(source), "--output", str(output))
    assert output.read_text() == printed.out
    assert f"next: vlmpipe check {output}" in written.out
    again = vlmpipe("import", str(source), "--output", str(output))
    assert again.code == 64
    assert "exists already" in again.err
    assert output.read_text() == printed.out


def test_json_is_one_object_with_every_finding(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    source = tmp_path / "job.json"
    source.write_text(LISTINGS["A2.5-custom-job"])
    found = vlmpipe("import", str(source), "--job-spec", "--json").json
    assert (found["result"], found["kind"]) == ("job spec", "a job spec")
    assert sum(found["counts"].values()) == len(found["findings"])
    assert {"path", "value", "outcome", "field", "reason"} == found["findings"][0].keys()


def test_the_corrected_spec_is_accepted_by_check(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    source, output = tmp_path / "job.json", tmp_path / "corrected.yaml"
    source.write_text(LISTINGS["B6.2-arr-coc"])
    assert vlmpipe("check", "--job-spec", str(source)).code == 64
    assert vlmpipe("import", str(source), "--job-spec", "--output", str(output)).code == 0
    assert vlmpipe("check", "--job-spec", str(output)).code == 0


def test_one_of_file_and_command_is_given(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert vlmpipe("import").code == 64
    assert vlmpipe("import", "a.yaml", "--command", "torchrun train.py").code == 64
    assert "train.py" in vlmpipe("import", "--command", "torchrun --nproc_per_node=8 train.py").out
    other = vlmpipe("import", "--command", "torchrun train.py", "--job-spec")
    assert (other.code, "expected: a job spec" in other.err) == (64, True)


def test_outputs_of_the_guides_page_are_those_of_its_commands() -> None:
    assert PAGE.read_text() == guide_page(PAGE.read_text()), "run: python -m tests.support.generated_files"
