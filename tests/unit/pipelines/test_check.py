"""`vlmpipe check`: what can be known of a chat template before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.run_files import small
from tests.support.trainer.benchmark_files import write
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, with_template
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines import check
from vlmpipe.pipelines.check import check_run
from vlmpipe.pipelines.checks.data_look import has_module
from vlmpipe.pipelines.checks.finding import exit_code
from vlmpipe.trainer.errors import ExitCode


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plan, which takes a trace of the model."""
    monkeypatch.setattr(check, "_plan", lambda config: iter(()))


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("template", "state", "text"),
    [
        (PLAIN, "ok", "native: 7 of 9 kinds of conversation; not thinking"),
        (TEMPLATES["no end token"], "failed", "writes no end token after the text of answer 1"),
    ],
)
def test_a_chat_template_is_proved(template: str, state: str, text: str, tmp_path: Path) -> None:
    with_template(template.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(tmp_path)
    findings = check_run(small(model__tokenizer=str(tmp_path), data__chat_template="native"))
    (found,) = [finding for finding in findings if finding.subject == "chat template"]
    assert found.state == state and text in found.text
    assert found.code == (ExitCode.CONFIG if state == "failed" else 0)


@pytest.mark.usefixtures("unplanned")
def test_a_template_of_another_machine_is_proved_later() -> None:
    findings = check_run(small(model__tokenizer="some/model", data__chat_template="gs://bucket/mine.jinja"))
    (found,) = [finding for finding in findings if finding.subject == "chat template"]
    assert found.state == "unchecked"


@pytest.mark.usefixtures("unplanned")
def test_files_of_benchmarks_are_read_and_compared_with_their_format(tmp_path: Path) -> None:
    pope, chart = (write(tmp_path / form, form) for form in ("pope", "chartqa"))
    elsewhere = pope.model_copy(update={"name": "elsewhere", "uri": "gs://bucket/pope.json"})
    wrong = chart.model_copy(update={"name": "wrong", "format": "docvqa"})
    chosen = [one.model_dump() for one in (pope, elsewhere, wrong)]
    findings = [one for one in check_run(small(evaluate__benchmarks=chosen)) if one.subject == "benchmarks"]
    assert [one.state for one in findings] == ["ok", "unchecked", "failed"]
    assert findings[0].text == "pope: 2 questions of pope about 2 images"
    assert findings[2].code == ExitCode.DATA and "is not DocVQA's single-document task" in findings[2].text


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("python", "state", "said"),
    [
        (sys.executable, "ok", "can be started; lmms-eval reads pope in the step benchmark"),
        ("nowhere/python", "failed", "nowhere/python is no program"),
        ("", "unchecked", "lmms-eval reads pope in the step benchmark"),
    ],
)
def test_the_python_of_lmms_eval_is_looked_for(python: str, state: str, said: str) -> None:
    findings = check_run(small(evaluate__lmms_eval={"tasks": ["pope"], "python": python}))
    (found,) = (one for one in findings if one.subject == "benchmarks")
    assert found.state == state and said in found.text


@pytest.mark.usefixtures("unplanned")
def test_findings_of_a_stage_name_it_and_common_ones_are_printed_once() -> None:
    stages = "stages=[{name: align, train: {micro_batch_size: 1}}, {name: finetune, data: {source: nowhere.json}}]"
    findings = check_run(load_run_file(ROOT / "configs/digits.yaml", [stages]))
    subjects = [finding.subject for finding in findings]
    assert subjects.count("tower") == 1 and subjects.count("tokenizer") == 1
    assert {"align: batch", "finetune: batch"} <= set(subjects) and "batch" not in subjects
    (failed,) = [finding for finding in findings if finding.state == "failed"]
    assert failed.subject == "finetune: data" and "nowhere.json" in failed.text
    assert exit_code(findings) == failed.code


def test_a_step_whose_disk_is_too_small_fails_as_in_the_plan() -> None:
    overrides = ["plan.sample_images=4", "cluster.step_disks={prepare-data: 100}"]
    config = load_run_file(ROOT / "configs/llava-7b.yaml", overrides)
    (found,) = [one for one in check._plan(config) if one.state == "failed"]
    assert found.subject == "plan" and found.code == ExitCode.CONFIG
    assert found.text.startswith("step prepare-data: its boot disk of 100 GB has 87 GB")
    fixed = load_run_file(ROOT / "configs/llava-7b.yaml", [overrides[0], found.text.rpartition("; set ")[2]])
    assert not [one for one in check._plan(fixed) if one.state == "failed"]


@pytest.mark.usefixtures("unplanned")
def test_a_users_function_is_called_here_and_its_module_must_be_in_the_image(tmp_path: Path) -> None:
    def found(source: str, *overrides: str) -> list[tuple[str, int]]:
        run = load_shipped(ROOT / "configs/digits.yaml", [f"data.source={source}", *overrides])
        return [(one.state, one.code) for one in check_run(run) if one.subject == "data"]

    (tmp_path / "mine.py").write_text(
        "def records():\n    for n in range(20):\n        yield {'id': n, 'question': f'What is {n}?', 'answer': 'B'}\n"
    )
    only_here = "gcp.project="
    ((state, code),) = found(f"{tmp_path}/mine.py:records", only_here)
    assert code == 0 and state in ("ok", "warning")
    assert found(f"{tmp_path}/mine.py:records", only_here, "data.columns={answer: labl}") == [("failed", ExitCode.DATA)]
    assert found(f"{tmp_path}/mine.py:others", only_here) == [("failed", ExitCode.CONFIG)]
    assert found("no_such_module:records", only_here) == [("failed", ExitCode.CONFIG)]
    assert found("no_such_module:records") == [("unchecked", 0)]


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("overrides", [["gcp.project="], []], ids=["for this machine", "for Vertex AI"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("import missing", "ModuleNotFoundError: "),
    ],
)
def test_a_package_that_cannot_be_imported_is_reported_with_its_error(
    code: str, error: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "badpkg").mkdir()
    (tmp_path / "badpkg" / "__init__.py").write_text(f"{code}\n")
    (tmp_path / "badpkg" / "sub.py").write_text("def f():\n    yield {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = load_shipped(ROOT / "configs/digits.yaml", ["data.source=badpkg.sub:f", *overrides])
    *_, finding = [one for one in check_run(run) if one.subject == "data"]
    assert (finding.state, finding.code) == ("failed", ExitCode.CONFIG)
    assert error in finding.text
    assert has_module("badpkg.sub") and not has_module("no_such_package.sub")
