"""Job specs from files: every form that people have, each problem by the name that it has in the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tests.support.pipelines.job_spec_cases import CASES
from tests.support.pipelines.job_specs import CLUSTER, IMAGE, ONE, REDUCED, Case, a100, changed, in_camel_case, leaves
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.cli import app as cli
from vlmpipe.config.yaml_loader import LARGEST_FILE_BYTES
from vlmpipe.job_spec.file import SpecFile, read_spec_file, spec_of
from vlmpipe.job_spec.rules import Violation
from vlmpipe.job_spec.schema import read_message
from vlmpipe.trainer.errors import ConfigError

FOLDER = ROOT / "tests/fixtures/job-specs"
CATALOG = load_catalog()
NINE = ["VP101", "VP101", "VP108", "VP203", "VP207", "VP216", "VP303", "VP602", "VP701"]


def check(content: Any, region: str = "") -> list[Violation]:
    return spec_of(content).check(CATALOG, region)


@pytest.mark.parametrize("name", ["nine-mistakes.yaml", "nine-mistakes-sdk.yaml"])
def test_a_spec_with_nine_mistakes_gives_exactly_nine_violations(name: str) -> None:
    found = read_spec_file(FOLDER / name).check(CATALOG, "us-central1")
    assert sorted(violation.code for violation in found) == NINE
    assert {violation.code for violation in found if violation.severity == "warning"} == {"VP216", "VP602"}


def test_a_field_is_named_as_in_the_file() -> None:
    paths = {name: [found.path for found in read_spec_file(FOLDER / name).check(CATALOG)] for name in (
        "nine-mistakes.yaml", "nine-mistakes-sdk.yaml",
    )}  # fmt: skip
    assert "jobSpec.workerPoolSpecs[0].machineSpec.acceleratorType" in paths["nine-mistakes.yaml"]
    assert "jobSpec.workerPoolSpecs[0].diskSpec.persistentDiskSizeGb" in paths["nine-mistakes.yaml"]
    assert "worker_pool_specs[0].machine_spec.accelerator_type" in paths["nine-mistakes-sdk.yaml"]


def test_the_fix_uses_the_spelling_of_the_file() -> None:
    (found,) = check(in_camel_case(changed(ONE, {"worker_pool_specs.0.replica_count": 4})) | {"models": []})[:1]
    assert found.fix == "move the other replicas to workerPoolSpecs[1]"


TUNING: dict[str, Any] = {
    "display_name": "study", "max_trial_count": 3, "parallel_trial_count": 1,
    "study_spec": {
        "metrics": [{"metric_id": "loss", "goal": "MINIMIZE"}],
        "parameters": [{"parameter_id": "lr", "double_value_spec": {"max_value": 1}}],
    },
}  # fmt: skip
FORMS = {
    "spec": lambda spec: spec,
    "job": lambda spec: {"display_name": "job", "labels": {"a": "b"}, "job_spec": spec},
    "tuning": lambda spec: {**TUNING, "trial_job_spec": spec},
    "pools": lambda spec: spec["worker_pool_specs"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spell", [dict, in_camel_case], ids=["snake_case", "camelCase"])
@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["JSON", "YAML"])
def test_every_form_is_read(form: str, spell: Any, write: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text(write(FORMS[form](spell(REDUCED)) if spell is dict else in_camel_case(FORMS[form](REDUCED))))
    file = read_spec_file(path)
    assert read_message(file.content).fields["worker_pool_specs"] == REDUCED["worker_pool_specs"]
    assert file.check(CATALOG) == []


def test_the_region_of_a_job_that_was_described_is_known() -> None:
    name = "projects/123/locations/africa-south1/customJobs/456"
    assert [found.code for found in check({"name": name, "job_spec": ONE})] == ["VP308"]
    assert check({"name": name, "job_spec": ONE}, "us-central1") == []


def test_a_job_as_gcloud_describes_it_breaks_no_rule() -> None:
    described = in_camel_case(CLUSTER)
    for pool in described["workerPoolSpecs"]:
        pool["replicaCount"] = str(pool["replicaCount"])  # 64-bit numbers are text in the API's JSON
        pool["diskSpec"] = {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 100}
    described["workerPoolSpecs"][0]["containerSpec"]["env"] = [{"name": "EMPTY"}]  # what is empty is left out
    assert check({"state": "JOB_STATE_SUCCEEDED", "createTime": "2026-11-20T00:00:00Z", "jobSpec": described}) == []


def test_the_other_spelling_is_named_field_by_field() -> None:
    mixed = in_camel_case(ONE) | {"service_account": ONE["service_account"], "enable_web_access": True}
    del mixed["serviceAccount"]
    found = check(mixed)
    assert [(one.code, one.path, one.expected) for one in found] == [
        ("VP102", "service_account", "serviceAccount"),
        ("VP102", "enable_web_access", "enableWebAccess"),
    ]


def test_a_field_in_both_spellings_is_named() -> None:
    found = check(ONE | {"serviceAccount": "other@example.com"})
    assert [(one.code, one.path) for one in found] == [("VP101", "serviceAccount")]
    assert found[0].fix == "write service_account once: it is given in both spellings"


# The first is of one spelling; what the second compares with is in run files only.
NOT_OF_FILES = ("VP102", "VP606")


def test_both_spellings_of_a_broken_spec_break_the_same_rules() -> None:
    def codes(case: Case) -> list[list[str]]:
        broken = changed(case.base, case.broken)
        return [[one.code for one in check(spec, case.region)] for spec in (broken, in_camel_case(broken))]

    cases = [case for case in CASES if case.code not in NOT_OF_FILES]
    assert [found for case in cases if (found := codes(case)) != [[case.code]] * 2] == []


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["SPOT", "4"])


@given(st.dictionaries(st.sampled_from(list(leaves(REDUCED))), VALUES, max_size=5))
def test_both_spellings_of_any_mixture_break_the_same_rules(values: dict[tuple[Any, ...], Any]) -> None:
    spec = changed(REDUCED, {".".join(map(str, path)): value for path, value in values.items()})
    assert [one.code for one in check(spec)] == [one.code for one in check(in_camel_case(spec))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*in_camel_case(ONE), *ONE]) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    st.lists(JSON, max_size=3)
    | st.dictionaries(st.sampled_from(["jobSpec", "trialJobSpec", "studySpec", *ONE]) | st.text(), JSON, max_size=4)
)
def test_no_content_of_a_file_makes_reading_fail(content: Any) -> None:
    file = spec_of(content)
    assert isinstance(file, SpecFile) and isinstance(file.check(CATALOG), list)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"just words", "is a str"),
        (b"[1, 2", "is neither YAML nor JSON"),
        (b"a: b: c", "line 1"),
        (b'{"a": 1, "a": 2}', "gives keys twice: a"),
        (b"network: a\nworker_pool_specs: []\nnetwork: b\n", "gives keys twice: network (line 3)"),
        (b"a: 1\n---\nb: 2\n", "is neither YAML nor JSON"),
        (b"\xff\xfe\x00", "is not text"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "is nested too deeply"),
        (b"a: !!python/object:os.system {}", "is neither YAML nor JSON"),
        (b"x" * (LARGEST_FILE_BYTES + 1), "at most"),
        (b"model: {}\ndata: {}\ntrain: {}\n", "is a run file"),
        (b"pipelineInfo: {}\ndeploymentSpec: {}\n", "is a compiled pipeline"),
        (b"apiVersion: v1\nkind: Job\n", "is a Kubernetes object"),
        (
            b"worker_pool_specs:\n- container_spec: {args: &a [" + b"x, " * 2000 + b"x]}\n"
            + b"- container_spec: {args: *a}\n" * 60,
            "more than 100,000 values",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_job_spec_is_refused_with_a_message(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_spec_file(path)
    assert words in str(caught.value)


def test_a_missing_file_is_refused_with_a_message(vlmpipe: Any) -> None:
    code, out, err = vlmpipe("check", "--job-spec", "nowhere.yaml")
    assert code != 0 and out == "" and "nowhere.yaml" in err and "Traceback" not in err


def test_yaml_anchors_are_expanded_and_dates_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""
base: &base
  machine_spec: {{machine_type: n1-standard-8}}
  container_spec: {{image_uri: {IMAGE}, env: [{{name: DAY, value: 2026-11-20}}]}}
worker_pool_specs:
- <<: *base
  replica_count: 1
service_account: trainer@example-project.iam.gserviceaccount.com
"""
    )
    found = read_spec_file(path).check(CATALOG)
    assert [(one.code, one.path) for one in found] == [("VP101", "base")]


# The command


@pytest.fixture
def vlmpipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """The console script, called in this process from the repository's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return call


def test_the_command_names_nine_of_nine_and_ends_with_64(vlmpipe: Any) -> None:
    code, out, _ = vlmpipe("check", "--job-spec", "tests/fixtures/job-specs/nine-mistakes.yaml", "--region", "us-east1")
    assert code == 64
    assert (out.count("✗ VP"), out.count("! VP")) == (7, 2)
    assert out.startswith("7 errors, 2 warnings\n")
    assert "0123456789abcdef" not in out


def test_the_command_with_json_prints_every_field_of_every_violation(vlmpipe: Any) -> None:
    code, out, _ = vlmpipe("check", "--job-spec", "tests/fixtures/job-specs/nine-mistakes-sdk.yaml", "--json")
    answer = json.loads(out)
    assert (code, answer["ok"], answer["spelling"], len(answer["violations"])) == (64, False, "snake_case", 9)
    assert set(answer["violations"][0]) == {"code", "severity", "path", "found", "expected", "fix", "source"}


def test_the_study_around_a_trials_spec_is_checked_and_the_rest_said_not_to_be(vlmpipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    study = in_camel_case({**TUNING, "study_spec": {**TUNING["study_spec"], "nonsense": 1}})
    path.write_text(json.dumps({**study, "encryptionSpec": {"kmsKeyName": "k"}, "trialJobSpec": in_camel_case(ONE)}))
    code, out, _ = vlmpipe("check", "--job-spec", str(path), "--region", "us-central1")
    assert code == 64 and "studySpec.nonsense" in out and "Not checked: encryption_spec." in out
    assert json.loads(vlmpipe("check", "--job-spec", str(path), "--json")[1])["not_checked"] == ["encryption_spec"]


def test_warnings_alone_end_with_0(vlmpipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(in_camel_case(changed(ONE, {"service_account": ""}))))
    code, out, _ = vlmpipe("check", "--job-spec", str(path), "--region", "us-central1")
    assert code == 0
    assert out.startswith("1 warning\n")


def test_a_valid_spec_says_so_and_what_was_not_checked(vlmpipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps([a100()]))
    code, out, _ = vlmpipe("check", "--job-spec", str(path))
    assert code == 0
    assert out.splitlines()[0] == "nothing wrong with this job spec"
    assert "Give --region" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "neither a run file nor a job spec given"),
        (("configs/digits.yaml", "--job-spec", "job.yaml"), "both a run file and a job spec given"),
        (("configs/digits.yaml", "--region", "us-central1"), "--region is given with a run file"),
    ],
)
def test_the_command_takes_a_run_file_or_a_job_spec(vlmpipe: Any, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = vlmpipe("check", *arguments)
    assert code == 64 and words in err


def test_checking_a_job_spec_loads_nothing_slow() -> None:
    program = (
        "import sys, json; from vlmpipe.job_spec.file import read_spec_file; "
        "from vlmpipe.catalog.machines import load_catalog; import vlmpipe.cli.views.tables; "
        "read_spec_file(sys.argv[1]).check(load_catalog()); print(json.dumps(sorted(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(FOLDER / "nine-mistakes.yaml")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    slow = {"torch", "kfp", "google.cloud.aiplatform_v1", "google.protobuf", "transformers", "numpy"}
    assert slow & set(json.loads(answer.stdout)) == set()


@pytest.mark.timeout(10)
def test_a_fifo_is_refused_as_job_spec(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match=r"job\.yaml is a FIFO"):
        read_spec_file(tmp_path / "job.yaml")
