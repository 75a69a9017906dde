"""`vlmpipe`: help, errors, `check`, `plan`, `schema`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.paths import ROOT
from tests.support.planner.plans import PLANNED_BY_TESTS
from tests.support.short_form import chosen
from tests.support.trainer.tiny_native import CONFIGS, model_section
from vlmpipe import api
from vlmpipe.cli import output
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.pipelines.checks.finding import Finding

DIGITS = "configs/digits.yaml"


def test_loading_the_command_line_loads_nothing_slow() -> None:
    program = "import sys, json, vlmpipe.cli.app; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    slow = {"torch", "kfp", "google.cloud.aiplatform", "transformers", "numpy", "pydantic", "rich.live", "yaml"}
    assert slow & set(json.loads(answer.stdout)) == set()


def test_help_names_every_command(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("--help")
    assert answer.code == 0
    for command in (
        "check",
        "plan",
        "compile",
        "publish",
        "submit",
        "run",
        "status",
        "cancel",
        "logs",
        "diagnose",
        "schema",
    ):
        assert f" {command} " in answer.out


@pytest.mark.parametrize("group", [[], ["schedule"], ["cache"]], ids=" ".join)
def test_help_cuts_off_no_commands_summary(vlmpipe: Vlmpipe, group: list[str]) -> None:
    answer = vlmpipe(*group, "--help")
    assert "Commands:" in answer.out
    assert "..." not in answer.out.partition("Commands:")[2]


def test_help_does_not_wait_for_heavy_packages() -> None:
    heavy = {"rich", "pydantic", "yaml", "numpy"}
    program = (
        f"import sys, atexit; atexit.register(lambda: print(sorted({heavy} & set(sys.modules))))\n"
        "sys.argv = ['vlmpipe', '--help']; from vlmpipe.cli import app; app.app()"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_version(vlmpipe: Vlmpipe) -> None:
    assert vlmpipe("--version") == (0, "vlmpipe 0.1.0\n", "")


SHIPPED = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
CHECKED = (*PLANNED_BY_TESTS, "llava-local")  # a check of others takes seconds


@pytest.mark.parametrize("path", chosen(SHIPPED, CHECKED.__contains__).values(), ids=lambda path: path.stem)
def test_check_finds_nothing_wrong_with_a_shipped_run_file(vlmpipe: Vlmpipe, path: Path) -> None:
    override = ["data.source=builtin:digits", "data.image_folder="] if path.stem == "llava-local" else []
    answer = vlmpipe("check", str(path), "--json", *override)
    assert answer.code == 0
    assert {check["state"] for check in answer.json["checks"]} <= {"ok", "unchecked"}


@pytest.mark.parametrize(
    ("override", "subject", "code"),
    [
        ("data.source=nowhere.json", "data", 64),
        ("model.image_size=32", "image tokens", 64),
        ("data.sequence_length=4", "image tokens", 64),
        ("output.root_uri=README.md/runs", "output", 64),
    ],
)
def test_check_fails_with_the_finding_and_its_exit_code(
    vlmpipe: Vlmpipe, override: str, subject: str, code: int
) -> None:
    answer = vlmpipe("check", DIGITS, override, "--json")
    assert answer.code == code
    failed = [check["subject"] for check in answer.json["checks"] if check["state"] == "failed"]
    assert failed == [subject]


def test_an_error_is_a_sentence_on_stderr(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("check", DIGITS, "train.learning_rat=1")
    assert answer.code == 64
    assert answer.out == ""
    assert answer.err.startswith(f"error: {DIGITS}: 1 problem\n")
    assert "did you mean train.optimizer.learning_rate?" in answer.err
    assert "Traceback" not in answer.err


def test_an_error_with_json_is_an_object(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("check", "configs/digit.yaml", "--json")
    assert answer.code == 64
    assert answer.json["error"]["found"] == "no run file configs/digit.yaml"
    assert DIGITS in answer.json["error"]["fix"]


@pytest.mark.parametrize("place", range(3))
def test_debug_shows_the_traceback_wherever_it_is_typed(vlmpipe: Vlmpipe, place: int) -> None:
    arguments = ["check", "nowhere.yaml"]
    arguments.insert(place, "--debug")
    answer = vlmpipe(*arguments)
    assert answer.code == 64
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-3].startswith("error: no run file nowhere.yaml")


def test_an_unexpected_error_has_a_traceback_only_with_debug(vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr(api, "check", fail)
    answer = vlmpipe("check", DIGITS)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: unexpected ZeroDivisionError: a fault of the program\n")
    assert "--debug" in answer.err and "Traceback" not in answer.err
    assert "Traceback" in vlmpipe("check", DIGITS, "--debug").err


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_slow_command_prints_one_notice(
    vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch, as_json: list[str]
) -> None:
    """Not on standard output, which stays as it is."""
    quick = vlmpipe("check", DIGITS, *as_json)
    said, check = threading.Event(), api.check

    def wait_for_notice(config: RunConfig) -> list[Finding]:
        assert said.wait(60)
        return check(config)

    def to_stderr(text: str) -> None:
        print(text, file=sys.stderr)
        said.set()

    monkeypatch.setattr(output, "SILENT_S", 0.0)
    monkeypatch.setattr(output, "to_stderr", to_stderr)
    monkeypatch.setattr(api, "check", wait_for_notice)
    slow = vlmpipe("check", DIGITS, *as_json)
    assert slow.out == quick.out
    assert slow.err == f"checking {DIGITS}: model, data, batch, output and job specs ...\n"


def test_plan_shows_the_pools_and_marks_unknown_values(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "plan.samples=0")
    assert answer.code == 0
    pools = [line.split() for line in answer.out.splitlines() if "a2-ultragpu-8g" in line or "n1-highcpu-16" in line]
    assert ["2", "Reduction", "Server", "13", "x", "n1-highcpu-16", "–", "–"] in pools
    assert "training hours unknown" in answer.out


def test_plan_of_a_local_run_has_no_prices(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "configs/digits.yaml", "--target", "local")
    assert answer.code == 0 and "On this machine (" in answer.out and "n1-standard-8" not in answer.out
    assert "$" not in answer.out and "cost" not in answer.out.lower() and "price" not in answer.out
    plan = vlmpipe("plan", "configs/digits.yaml", "--target", "local", "--json").json
    assert plan["cost"] is None and plan["reduction_server"] is None
    refused = vlmpipe("plan", DIGITS, "--target", "local", "--suggest", "cheapest")
    assert refused.code == 64 and "--suggest with --target local" in refused.err


def test_a_red_plan_ends_with_64_and_names_settings_that_fit(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "train.strategy=ddp", "--json")
    plan = json.loads(answer.out)
    assert (answer.code, plan["state"]) == (64, "red")
    assert {"train.strategy": "zero2"} in [setting["change"] for setting in plan["memory"]["nearest"]]


@pytest.mark.slow
def test_suggestions_keep_to_the_bound_and_can_be_planned_as_printed(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "--suggest", "under:1200", "--json")
    suggestions, today = json.loads(answer.out)["suggestions"], json.loads(answer.out)["today"]
    assert today["change"] == {} and today["usd"] > 0
    assert suggestions and all(one["usd"] <= 1200 for one in suggestions)
    assert [one["hours"] for one in suggestions] == sorted(one["hours"] for one in suggestions)
    strategies = {one["change"]["train.strategy"] for one in suggestions}
    assert strategies & {"pp", "tp", "tp+pp+dp"}  # more GPUs than a step has rows
    for one in (today, *suggestions):
        change = [f"{field}={json.dumps(value)}" for field, value in one["change"].items()]
        plan = json.loads(vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", *change, "--json").out)
        assert plan["memory"]["fits"] == one["fits"] and plan["memory"]["total_bytes"] / 2**30 == pytest.approx(
            one["memory_gib"]
        )
        assert plan["time"]["step_s"] == pytest.approx(one["step_s"])
        assert plan["cost"]["usd"] == pytest.approx(one["usd"])


@pytest.mark.parametrize("goal", ["best", "under", "by:soon", "cheapest:3"])
def test_an_unknown_goal_is_a_sentence(vlmpipe: Vlmpipe, goal: str) -> None:
    answer = vlmpipe("plan", DIGITS, "--suggest", goal)
    assert answer.code == 64 and "expected: cheapest, fastest, under:USD or by:HOURS" in answer.err


def test_schema_is_printed_and_written(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    printed = vlmpipe("schema").json
    assert "train" in printed["required"]
    assert vlmpipe("schema", "--markdown").out.startswith("# Run file")
    assert vlmpipe("schema", "--output", str(tmp_path)).code == 0
    assert json.loads((tmp_path / "run-file.schema.json").read_text()) == printed


@pytest.fixture
def whole_model(tmp_path: Path) -> str:
    """A run file with a native model, whose configuration lies in a local folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen2_5_vl"]))
    content = dict(read_run_file(ROOT / DIGITS))
    content["model"] = model_section("qwen2_5_vl", pretrained={"weights": str(folder)})
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    return str(tmp_path / "run.yaml")


@pytest.mark.parametrize(("pixels", "state"), [(2048, "ok"), (16_384, "failed"), (40, "failed")])
def test_check_counts_the_tokens_of_the_largest_image(
    vlmpipe: Vlmpipe, whole_model: str, pixels: int, state: str
) -> None:
    """A token is 8 x 8 pixels; a row has 256."""
    overrides = [f"model.max_pixels={pixels}", "model.min_pixels=30", "data.sequence_length=256"]
    checks = vlmpipe("check", whole_model, *overrides, "--json").json["checks"]
    assert [check["state"] for check in checks if check["subject"] == "image tokens"] == [state]


SIZES = ["model.max_pixels=2048", "plan.samples=1000", "plan.sample_tokens=100"]


def test_plan_answers_for_a_whole_model(vlmpipe: Vlmpipe, whole_model: str) -> None:
    """A token is 8 x 8 pixels."""
    plan = vlmpipe("plan", whole_model, *SIZES, "--json").json
    assert plan["model"]["parts"]["projector"] == 64 * 65 + 64 * 32 + 32 + 16
    assert plan["load"]["image_tokens"] == 32 and "taken as 32 tokens, the most" in plan["load"]["origin"]
    assert {"weights", "gradients", "optimizer", "activations"} <= {part["name"] for part in plan["memory"]["parts"]}


@pytest.mark.slow
def test_suggest_answers_for_a_whole_model(vlmpipe: Vlmpipe, whole_model: str) -> None:
    gpus = {"machine_type": "a2-ultragpu-8g", "accelerator_type": "NVIDIA_A100_80GB", "accelerator_count": 8}
    cluster = [f"cluster.{name}={value}" for name, value in (gpus | {"processes_per_replica": "auto"}).items()]
    sizes = [*SIZES, "gcp.location=us-central1", "train.global_batch_size=32"]
    answer = vlmpipe("plan", whole_model, *sizes, *cluster, "--suggest", "cheapest", "--json")
    assert answer.json["suggestions"]
    today, plan = answer.json["today"], vlmpipe("plan", whole_model, *sizes, *cluster, "--json").json
    assert today["usd"] == pytest.approx(plan["cost"]["usd"]) and today["step_s"] == pytest.approx(
        plan["time"]["step_s"]
    )
    assert today["memory_gib"] == pytest.approx(plan["memory"]["total_bytes"] / 2**30)
