"""Short names of runs: the newest, the newest of a name, and the beginning of an id."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.comparison.sides import run_uri_named
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.platforms.find import find, reader_of
from vlmpipe.platforms.short_names import full_name, run_to_continue, submitted_to_continue
from vlmpipe.platforms.vertex.run import RunOnVertex
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.runs.submitted import RunRecord
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

JOB = "projects/p/locations/europe-west4/pipelineJobs/qwen-20260103-000000-a3f09c"


def run_file(root_uri: str, name: str = "digits") -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={root_uri}", f"name={name}"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two runs of one run file and one of a run file whose name begins alike, and a later one on Vertex AI."""
    monkeypatch.chdir(tmp_path)
    for name, started_s in (("digits-20260101-000000", 1.0), ("digits-20260102-000000", 2.0), ("digits-dpo-1", 3.0)):
        Marker(name, "d", ("digits.yaml",), started_s, started_s + 1, 0).write(tmp_path / "root/runs" / name)
    RunRecord(JOB, "gs://bucket/runs/qwen-20260103-000000-a3f09c", submitted_s=4.0).write("qwen-20260103-000000-a3f09c")
    return str(tmp_path / "root")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("@last", "qwen-20260103-000000-a3f09c"),
        ("@last:digits-dpo", "digits-dpo-1"),
        ("@last:digits", "digits-20260102-000000"),
        ("@last:digits-2026", "digits-20260102-000000"),
        ("digits-20260102", "digits-20260102-000000"),
        ("qw", "qwen-20260103-000000-a3f09c"),
    ],
)
def test_a_short_name_is_one_run(root: str, short: str, long: str) -> None:
    assert full_name(short, root) == long


def test_a_whole_id_is_found_beside_a_damaged_run(root: str) -> None:
    Path(root, "runs/digits-dpo-1/local.json").write_text("{")
    assert full_name("digits-20260101-000000", root) == "digits-20260101-000000"
    with pytest.raises(DataError, match=r"digits-dpo-1/local\.json is damaged"):
        full_name("@last", root)


def test_runs_whose_ids_were_chosen_are_of_their_run_file(root: str) -> None:
    for number, name in enumerate(("baseline", "digits-other"), start=7):
        folder = Path(root, "runs", name)
        Marker(name, "d", ("x.yaml",), float(number), number + 1.0, 0).write(folder)
        write_record(LocalStorage(folder), RUN_FILE_COPY, {"name": "digits" if name == "baseline" else "other"})
    assert full_name("@last:digits", root) == run_to_continue("@last", run_file(root)) == "baseline"
    assert run_to_continue("@last:other", run_file(root)) == "digits-other", "its run file's name, not its own"
    Path(root, "runs/baseline", RUN_FILE_COPY).write_text("{")
    assert full_name("@last:digits", root) == "digits-20260102-000000", "a damaged run has no name"
    assert full_name("@last", root) == "digits-other"


PREFERENCES = "digits-preferences-20260104-000000-b0c1d2"


def test_a_submitted_runs_random_digits_are_no_part_of_its_name(root: str) -> None:
    for number, name in enumerate(("digits-20260104-000000-a3f09c", PREFERENCES), start=5):
        RunRecord(JOB, f"gs://bucket/runs/{name}", submitted_s=float(number)).write(name)
    assert full_name("@last:digits", root) == "digits-20260104-000000-a3f09c"
    assert full_name("@last", root) == PREFERENCES


@pytest.mark.parametrize(
    "name", ["digits-dpo-1", "llava-1", "gs://bucket/runs/digits", "digits@champion", "", JOB, "1234567"]
)
def test_other_names_come_back_as_they_are(root: str, name: str) -> None:
    assert full_name(name, root) == name


def test_an_id_that_begins_another_is_itself(root: str) -> None:
    Marker("digits-dpo", "d", ("digits.yaml",), 9.0, 10.0, 0).write(Path(root, "runs/digits-dpo"))
    assert full_name("digits-dpo", root) == "digits-dpo"


def test_several_runs_of_one_beginning_are_named(root: str) -> None:
    with pytest.raises(ConfigError, match="2 runs begin with digits-2026, the newest: digits-20") as caught:
        full_name("digits-2026", root)
    remedy = next(word for word in str(caught.value.fix).split() if word.startswith("@last"))
    assert full_name(remedy, root) == "digits-20260102-000000"


def test_a_run_is_continued_by_a_short_name_and_a_new_one_keeps_its_own(root: str) -> None:
    name = "qwen-20260103-000000-a3f09c"
    qwen, digits = run_file("gs://bucket", "qwen"), run_file(root)
    RunRecord(JOB, f"gs://bucket/runs/{name}", submitted_s=5.0, source=("qwen.yaml",)).write(f"{name}-again")
    RunRecord(JOB, "gs://bucket/runs/qwen-tune-20260103-000000-a3f09c", submitted_s=6.0).write("a-search")
    for number, options in enumerate((("qwen.yaml", "--only", "probe"), ("--job-spec", "job.yaml")), start=7):
        RunRecord(JOB, f"gs://bucket/runs/probe-{number}", submitted_s=float(number), source=options).write(str(number))
    assert submitted_to_continue("@last", qwen, "vertex") == name
    assert submitted_to_continue("@last:qwen", run_file("gs://bucket"), "vertex") == name
    assert run_to_continue("@last", digits) == "digits-20260102-000000", "not of Vertex AI, nor digits-dpo"
    assert run_to_continue("@last:digits-dpo", digits) == "digits-dpo-1"
    assert run_to_continue("digits-2026", digits) == "digits-2026" and run_to_continue("", digits) == ""
    assert submitted_to_continue("digits-2026", qwen, "vertex") == "digits-2026"
    assert submitted_to_continue("", qwen, "vertex") == ""
    with pytest.raises(UserError, match="no run for @last:digits"):
        submitted_to_continue("@last:digits", qwen, "vertex")
    assert run_uri_named("@last:qwen", root) == f"gs://bucket/runs/{name}", "of a run on a service its own address"


def test_a_submitted_run_is_continued_on_its_service_and_at_its_root_only(root: str) -> None:
    for number, (page, folder) in enumerate(
        (
            (JOB, "gs://bucket/runs"),
            ("http://localhost:8888/#/runs/details/1", "gs://bucket/runs"),
            (JOB, "gs://other/runs"),
            (JOB, "gs://bucket/runs/of/another"),
        ),
        start=5,
    ):
        name = f"qwen-2026010{number}-000000-a3f09c"
        RunRecord(page, f"{folder}/{name}", submitted_s=float(number), source=("qwen.yaml",)).write(name)
    qwen = run_file("gs://bucket", "qwen")
    assert submitted_to_continue("@last", qwen, "vertex") == "qwen-20260105-000000-a3f09c"
    assert submitted_to_continue("@last", qwen, "kubeflow") == "qwen-20260106-000000-a3f09c"
    with pytest.raises(UserError, match="no run for @last of run file digits") as caught:
        submitted_to_continue("@last", run_file("gs://bucket"), "kubeflow")
    assert caught.value.expected == "one of the newest: qwen-20260106-000000-a3f09c"
    assert "--root" not in caught.value.fix, "neither run nor submit has that option"
    with pytest.raises(UserError, match="no run for @last") as caught:
        submitted_to_continue("@last:qwen", run_file("gs://nowhere"), "vertex")
    assert caught.value.expected == (
        "a run, but there is none in build/submitted that was sent to vertex and writes to gs://nowhere/runs/"
    )


@pytest.mark.parametrize("name", ["@last:dog", "@last:llava"])
def test_no_run_of_a_name_is_said(root: str, name: str) -> None:
    with pytest.raises(UserError, match=f"no run for {name}") as caught:
        full_name(name, root)
    assert caught.value.code == ExitCode.NOT_FOUND and "qwen-20260103-000000-a3f09c" in str(caught.value.expected)
    assert "give its --root" in caught.value.fix


def test_without_any_run_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        full_name("@last", "nowhere")
    assert caught.value.expected == "a run, but there is none in nowhere"


def test_a_submitted_run_is_found_on_its_service(root: str) -> None:
    found = find("@last", root=root, project="", location="")
    assert isinstance(found, RunOnVertex) and found.address.resource_name == JOB
    assert reader_of("@last:digits", root=root, project="", location="")[1] is False
