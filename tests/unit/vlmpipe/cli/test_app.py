"""The command line: what each command prints, and its exit code."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipelines import local_process
from pipelines.check import Finding
from tests.support.commands import parse_vlmpipe
from tests.support.data.prepared import llava_folder, record, write_json
from tests.support.paths import ROOT
from tests.support.short_form import only_whole
from tests.support.trainer.tiny_native import CONFIGS, model_section
from trainer.storage.local import LocalStorage
from trainer.storage.records import seal_lines, write_record
from vlmpipe import api
from vlmpipe.cli import app as cli
from vlmpipe.cli import output
from vlmpipe.cli.examples import EXAMPLES
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.runs.local.run import LocalRun
from vlmpipe.runs.vertex import names as addresses
from vlmpipe.runs.vertex.names import RunRecord

DIGITS = "configs/digits.yaml"


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Vlmpipe = Callable[..., Answer]


@pytest.fixture
def vlmpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Vlmpipe:
    """The console script, called in this process from the repository's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(addresses, "SUBMITTED", tmp_path / "submitted")  # not what was submitted from here
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")  # --debug sets it: this puts it back afterwards

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return call


def test_a_run_on_kubeflow_is_refused_with_the_commands_that_start_it(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("run", DIGITS, "train.epochs=2", "--target", "kubeflow")
    assert (answer.code, answer.out) == (64, "")
    assert "vlmpipe compile configs/digits.yaml train.epochs=2 --target kubeflow\n" in answer.err
    assert "--package-file build/pipelines/digits.kubeflow.yaml" in answer.err


def test_compile_reports_settings_without_effect_on_kubeflow(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", "configs/llava-7b-lora.yaml", "--target", "kubeflow", "--output", str(tmp_path))
    assert answer.code == 0 and (tmp_path / "llava-7b-lora.kubeflow.yaml").exists()
    assert "  cluster.scheduling_strategy: spot: has no effect on Kubeflow" in answer.out


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


def test_help_does_not_wait_for_rich() -> None:
    program = (
        "import sys, atexit; atexit.register(lambda: print([each for each in sys.modules if each[:4] == 'rich']))\n"
        "sys.argv = ['vlmpipe', '--help']; from vlmpipe.cli import app; app.app()"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_compiling_needs_no_planner_and_no_numpy(tmp_path: Path) -> None:
    program = (
        "import sys, atexit; loaded = {'numpy', 'torch', 'vlmpipe.planner.plan', 'google.cloud.aiplatform'}\n"
        "atexit.register(lambda: print(sorted(loaded & set(sys.modules))))\n"
        f"sys.argv = ['vlmpipe', 'compile', 'configs/digits.yaml', '--output', {str(tmp_path)!r}]\n"
        "from vlmpipe.cli import app; app.app()"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_version(vlmpipe: Vlmpipe) -> None:
    assert vlmpipe("--version") == (0, "vlmpipe 0.1.0\n", "")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_check_finds_nothing_wrong_with_a_shipped_run_file(vlmpipe: Vlmpipe, path: Path) -> None:
    override = ["data.source=builtin:digits", "data.image_folder="] if path.stem == "llava-local" else []
    answer = vlmpipe("check", str(path), "--json", *override)
    assert answer.code == 0
    assert {check["state"] for check in answer.json["checks"]} <= {"ok", "unchecked"}


def test_check_prints_a_line_for_each_check(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("check", DIGITS)
    for subject in ("run file", "tower", "data", "batch", "output", "job train", "vertex"):
        assert any(subject in line for line in answer.out.splitlines())


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

    def wait_for_notice(config: RunConfig, *, online: bool) -> list[Finding]:
        assert said.wait(60)
        return check(config, online=online)

    def to_stderr(text: str) -> None:
        print(text, file=sys.stderr)
        said.set()

    monkeypatch.setattr(output, "SILENT_S", 0.0)
    monkeypatch.setattr(output, "to_stderr", to_stderr)
    monkeypatch.setattr(api, "check", wait_for_notice)
    slow = vlmpipe("check", DIGITS, *as_json)
    assert slow.out == quick.out
    assert slow.err == f"checking {DIGITS}: model, data, batch, output and job specs ...\n"


GROUPS = [("", cli.app), *((f"{group.name} ", group.typer_instance) for group in cli.app.registered_groups)]
COMMANDS = [
    prefix + (command.name or command.callback.__name__)
    for prefix, group in GROUPS
    for command in group.registered_commands
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_two_or_three_examples_that_parse(vlmpipe: Vlmpipe, command: str) -> None:
    examples = [
        line.strip() for line in vlmpipe(*command.split(), "--help").out.partition("Examples:\n")[2].splitlines()
    ]
    assert 2 <= len(examples) <= 3
    for example in examples:
        program, *arguments = shlex.split(example)
        assert [program, *arguments][: 1 + len(command.split())] == ["vlmpipe", *command.split()]
        rest = parse_vlmpipe(arguments)
        for file in (argument for argument in rest if argument.startswith("configs/") and "*" not in argument):
            load_run_file(file, [each for each in rest if "=" in each and not each.startswith(("-", "kill:"))])


def test_examples_belong_to_commands_that_exist() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str], list[str]]:
    """What bash offers for the last word of a line typed in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vlmpipe"])
        monkeypatch.setenv("_VLMPIPE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            cli.main()
        return capfd.readouterr().out.split()

    return call


def test_the_shell_completes_commands_run_files_and_run_ids(
    complete: Callable[[str], list[str]], tmp_path: Path
) -> None:
    for name in ("own.yaml", "notes.txt", "configs/a.yaml", "configs/b.yml", "runs/runs/first-1/local.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    RunRecord("projects/p/locations/l/pipelineJobs/sent-1", "gs://b/r", 0.0).write("sent-1")
    assert complete("vlmpipe che") == ["check"]
    assert complete("vlmpipe check ") == ["configs/a.yaml", "configs/b.yml", "own.yaml"]
    assert complete("vlmpipe plan configs/") == ["configs/a.yaml", "configs/b.yml"]
    assert complete("vlmpipe compile o") == ["own.yaml"]
    assert set(complete("vlmpipe logs ")) == {"first-1", "sent-1"}
    assert complete("vlmpipe status fi") == ["first-1"]


def test_completion_can_be_installed(vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # which the tests may not run under
    assert "complete -o default -F _vlmpipe_completion vlmpipe" in vlmpipe("--show-completion").out
    assert "--install-completion" in vlmpipe("--help").out


def test_plan_shows_the_pools_and_marks_unknown_values(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "plan.samples=0")
    assert answer.code == 0
    pools = [line.split() for line in answer.out.splitlines() if "a2-ultragpu-8g" in line or "n1-highcpu-16" in line]
    assert ["2", "Reduction", "Server", "13", "x", "n1-highcpu-16", "–", "–"] in pools
    assert "training hours unknown" in answer.out


def test_plan_of_a_local_run_has_no_prices(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "--target", "local")
    assert answer.code == 0 and "training " in answer.out
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


@only_whole
def test_suggestions_keep_to_the_bound_and_can_be_planned_as_printed(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", "--suggest", "under:1200", "--json")
    suggestions = json.loads(answer.out)["suggestions"]
    assert suggestions and all(one["usd"] <= 1200 for one in suggestions)
    assert [one["hours"] for one in suggestions] == sorted(one["hours"] for one in suggestions)
    strategies = {one["change"]["train.strategy"] for one in suggestions}
    assert {"pp", "tp"} <= strategies  # more GPUs than a step has rows
    for one in suggestions:
        change = [f"{field}={json.dumps(value)}" for field, value in one["change"].items()]
        plan = json.loads(vlmpipe("plan", "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", *change, "--json").out)
        assert plan["memory"]["fits"] and plan["memory"]["total_bytes"] / 2**30 == pytest.approx(one["memory_gib"])
        assert plan["time"]["step_s"] == pytest.approx(one["step_s"])
        assert plan["cost"]["usd"] == pytest.approx(one["usd"])


@pytest.mark.parametrize("goal", ["best", "under", "by:soon", "cheapest:3"])
def test_an_unknown_goal_is_a_sentence(vlmpipe: Vlmpipe, goal: str) -> None:
    answer = vlmpipe("plan", DIGITS, "--suggest", goal)
    assert answer.code == 64 and "expected: cheapest, fastest, under:USD or by:HOURS" in answer.err


def test_compile_writes_one_file_for_each_run_file(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", DIGITS, "configs/llava-13b-fsdp.yaml", "train.epochs=2", "--output", str(tmp_path))
    assert answer.code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"digits.vertex.yaml", "llava-13b-fsdp.vertex.yaml"}


def test_compile_writes_nothing_when_one_run_file_is_incomplete(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", DIGITS, "configs/openmoji.yaml", "gcp.project=", "--output", str(tmp_path))
    assert answer.code == 64
    assert "gcp.project: missing" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_compile_refuses_two_run_files_of_one_name(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert "same name" in vlmpipe("compile", DIGITS, DIGITS, "--output", str(tmp_path)).err


def test_schema_is_printed_and_written(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    printed = vlmpipe("schema").json
    assert "train" in printed["required"]
    assert vlmpipe("schema", "--markdown").out.startswith("# Run file")
    assert vlmpipe("schema", "--output", str(tmp_path)).code == 0
    assert json.loads((tmp_path / "run-file.schema.json").read_text()) == printed


@pytest.fixture
def fake_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that only writes results: what is tested here is what is said of them."""
    results = {
        "evaluate.json": {
            "questions": 88, "exact_match": 0.94, "cider_d": 0.8, "chance": 0.21,
            "controls": {"no_image": {"exact_match": 0.2}},
            "slices": {"digit": {"exact_match": 0.9, "chance": 0.1}, "sum": {"exact_match": 0.8, "chance": None}},
        },
        "decision.json": {"accepted": True, "reason": "Accepted: above chance"},
        "registered.json": {"model": "digits", "version": 3, "uri": "x", "alias": "champion"},
        "report.html": {},
    }  # fmt: skip
    program = "import sys, pathlib, json\nfor name, value in json.loads(sys.argv[2]).items():\n"
    program += "    pathlib.Path(sys.argv[1], name).write_text(json.dumps(value))"

    def command(run: LocalRun, **_options: object) -> list[str]:
        return [sys.executable, "-c", program, str(run.folder), json.dumps(results)]

    monkeypatch.setattr(local_process, "pipeline_command", command)


@pytest.mark.usefixtures("fake_pipeline")
def test_run_ends_with_results_and_what_to_type_next(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    assert answer.code == 0
    folder = tmp_path / "runs" / "mine"
    said = [" ".join(line.split()) for line in answer.out.splitlines()]
    for line in (
        "Starting run mine",
        "held-out accuracy, 88 questions 94.0 %",
        "chance: always the most frequent answer 21.0 %",
        "same model without an image 20.0 %",
        "CIDEr-D of captions, from 0 to 10 0.80",
        "digit 90.0 % (chance 10.0 %)",
        "gate Accepted: above chance",
        "registered digits version 3, champion",
        f"report {folder}/report.html",
        f"vlmpipe status {folder} this summary again",
    ):
        assert line in said


@pytest.mark.usefixtures("fake_pipeline")
def test_a_run_on_data_of_ones_own_does_not_offer_that(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    source = write_json(llava_folder(tmp_path, 20)[0].parent / "a.json", [record(n) for n in range(20)])
    offer = "vlmpipe run configs/llava-local.yaml"
    own = (f"data.source={source}", f"data.image_folder={tmp_path / 'images'}")
    for overrides, offered in (((), True), (own, False)):
        answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path / 'runs'}", "--plain", *overrides)
        assert answer.code == 0 and (offer in answer.out) == offered, answer.out


@pytest.fixture
def rejecting_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = """import sys, pathlib; pathlib.Path(sys.argv[1], "decision.json").write_text(
        '{"accepted": false, "reason": "Rejected: below chance"}')"""
    monkeypatch.setattr(
        local_process, "pipeline_command", lambda run, **_: [sys.executable, "-c", decision, str(run.folder)]
    )


@pytest.mark.usefixtures("rejecting_pipeline")
def test_a_rejected_model_ends_with_76_where_that_is_asked_for(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    command = ("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    answer = vlmpipe(*command, "--fail-on-reject")
    assert (answer.code, "the gate rejected the model. Rejected: below chance" in answer.err) == (76, True)
    watch = ("status", "mine", "--root", str(tmp_path), "--watch", "--plain")
    assert [vlmpipe(*watch, *option).code for option in ((), ("--fail-on-reject",))] == [0, 76]
    assert vlmpipe("status", "mine", "--root", str(tmp_path), "--fail-on-reject").code == 64
    again = vlmpipe(*command)
    assert again.code == 64
    assert f"vlmpipe status {tmp_path / 'runs/mine'}" in again.err


@pytest.mark.usefixtures("rejecting_pipeline")
def test_a_rejected_run_shows_the_command_to_train_for_longer(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "train.epochs=7", "--plain")
    assert f"vlmpipe run {DIGITS} output.root_uri={tmp_path} train.epochs=14  " in answer.out


@pytest.mark.usefixtures("fake_pipeline")
def test_run_with_json_prints_one_object(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--json")
    assert answer.code == 0
    assert (answer.json["outcome"], answer.json["evaluation"]["exact_match"]) == ("done", 0.94)


def test_runs_are_compared_as_table_json_page_and_parquet(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    for name, said in (("first", "blue"), ("second", "red"), ("other", "red")):
        store = LocalStorage(tmp_path / "runs" / name)
        line = {"id": "a", "turn": 0, "slice": "all", "question": f"What? {name == 'other'}", "answer": "red"}
        store.write("predictions.jsonl", seal_lines([line | {"prediction": said, "correct": said == "red"}]))
        records = {"run": {"name": "x"}, "evaluate": {"questions": 1}, "prepared": {"prepared_uri": str(tmp_path)}}
        for file, content in records.items():
            write_record(store, f"{file}.json", content)
    compared = ("compare", "first", "second", "--root", str(tmp_path))
    answer = vlmpipe(*compared, "--html", str(tmp_path / "a.html"), "--predictions", str(tmp_path / "a.parquet"))
    assert answer.code == 0 and "+1.0000" in answer.out and "better" in answer.out
    assert "+1.000" in (tmp_path / "a.html").read_text() and (tmp_path / "a.parquet").stat().st_size > 0
    found = json.loads(vlmpipe(*compared, "--json").out)
    assert found["scores"][0]["runs"][1]["difference"] == 1.0
    assert found["disagreements"][0]["predictions"] == ["blue", "red"]
    answer = vlmpipe("compare", "first", "other", "--root", str(tmp_path))
    assert (answer.code, answer.out) == (65, "")
    assert "error: the runs share no question: first 1, other 1" in answer.err


@pytest.mark.usefixtures("fake_pipeline")
def test_status_lists_runs_and_shows_one(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert "No runs" in vlmpipe("status", "--root", str(tmp_path)).out
    vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    listed = vlmpipe("status", "--root", str(tmp_path)).out.splitlines()[-1].split()
    assert (listed[0], listed[-3:]) == ("mine", ["94.0", "%", "accepted"])
    assert "Accepted: above chance" in vlmpipe("status", "mine", "--root", str(tmp_path)).out
    assert vlmpipe("status", str(tmp_path / "runs" / "mine"), "--json").json["run_id"] == "mine"
    watched = vlmpipe("status", "mine", "--root", str(tmp_path), "--watch", "--plain")
    assert (watched.code, "Accepted: above chance" in watched.out) == (0, True)
    over = vlmpipe("cancel", "mine", "--root", str(tmp_path))
    assert (over.code, "nothing to cancel" in over.err) == (64, True)
    logs = vlmpipe("logs", "mine", "--root", str(tmp_path)).out
    assert "this attempt started at" in logs
    lines = [json.loads(line) for line in vlmpipe("logs", "mine", "--root", str(tmp_path), "--json").out.splitlines()]
    assert [line["text"] for line in lines] == logs.splitlines()
    assert lines[0].keys() == {"time", "step", "process", "text"} and lines[0]["process"] == "pipeline"
    assert vlmpipe("logs", "mine", "--root", str(tmp_path), "--step", "train").code == 66
    missing = vlmpipe("status", "other", "--root", str(tmp_path))
    assert (missing.code, "one of the newest: mine" in missing.err) == (66, True)


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


@only_whole
def test_suggest_answers_for_a_whole_model(vlmpipe: Vlmpipe, whole_model: str) -> None:
    gpus = {"machine_type": "a2-ultragpu-8g", "accelerator_type": "NVIDIA_A100_80GB", "accelerator_count": 8}
    cluster = [f"cluster.{name}={value}" for name, value in (gpus | {"processes_per_replica": "auto"}).items()]
    sizes = [*SIZES, "gcp.location=us-central1", "train.global_batch_size=32"]
    answer = vlmpipe("plan", whole_model, *sizes, *cluster, "--suggest", "cheapest", "--json")
    assert answer.json["suggestions"]
