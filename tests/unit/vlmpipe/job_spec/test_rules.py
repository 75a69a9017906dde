"""The rules about job specs: each is broken by its own fixture alone, and valid specs of every kind break none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import short_form
from tests.support.generated_files import RULES_PAGE, fields_json, job_spec_rules_page
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex
from tests.support.pipelines.job_spec_cases import CASES, WHOLE
from tests.support.pipelines.job_specs import (
    CLUSTER,
    CPU,
    HUB_TOKEN,
    ONE,
    REDUCED,
    TORCH_BUILDS,
    TPU,
    Case,
    Spec,
    changed,
    job,
    leaves,
    pool,
)
from vlmpipe.catalog.machines import Machine, load_catalog
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.build import jobs_of
from vlmpipe.job_spec.check import check_jobs, job_violations
from vlmpipe.job_spec.rules import RULES, Violation, check_spec
from vlmpipe.job_spec.rules.images import OLDEST_PYTHON
from vlmpipe.job_spec.schema import FIELDS_FILE, load_fields
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.plan import plan_run
from vlmpipe.trainer.errors import ConfigError

GENERATE = "run: python -m tests.support.generated_files"
RUN_FILES = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "recipes/plain/package.yaml"]
CATALOG = load_catalog()


def check(spec: Any, region: str = "") -> list[Violation]:
    return check_spec(spec, region=region, catalog=CATALOG, torch_builds=TORCH_BUILDS)


def codes(spec: Any, region: str = "") -> list[str]:
    return [violation.code for violation in check(spec, region)]


def name_of(case: Case) -> str:
    return f"{case.code}-{'-'.join(case.broken) or 'base'}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_fixture_breaks_its_rule_and_its_valid_neighbour_none(case: Case) -> None:
    assert codes(changed(case.base, case.broken), case.region) == [case.code]
    assert check(changed(case.base, case.neighbour), case.region) == []


@pytest.mark.parametrize(("code", "broken", "neighbour"), WHOLE)
def test_content_that_is_no_job_spec_gives_a_single_violation(code: str, broken: Any, neighbour: Any) -> None:
    assert (codes(broken), codes(neighbour)) == ([code], [])


@pytest.mark.parametrize(
    ("words", "servers"),
    [
        (["python", "-m", "parameter_server"], True),
        (["python", "t.py", "--role=ps"], True),
        (["python", "t.py"], False),
    ],
)
def test_servers_in_the_chiefs_pool_are_sent_to_the_servers_pool(words: list[str], servers: bool) -> None:
    spec = changed(CPU, {"worker_pool_specs.0.replica_count": 3, "worker_pool_specs.0.container_spec.command": words})
    (found,) = [one for one in check(spec) if one.code == "VP203"]
    assert ("worker_pool_specs[2]" in found.fix) == servers


def test_fields_of_the_job_in_a_pool_are_judged_in_the_same_round() -> None:
    network = {"network": "projects/my-project/global/networks/vpc", "reserved_ip_ranges": ["10.1.0.0/16"]}
    found = check(changed(ONE, {f"worker_pool_specs.0.{name}": value for name, value in network.items()}))
    place = "job_spec.worker_pool_specs[0]."
    assert [(one.code, one.path.removeprefix(place)) for one in found] == [
        ("VP101", "network"), ("VP101", "reserved_ip_ranges"), ("VP502", "network"), ("VP503", "reserved_ip_ranges[0]"),
    ]  # fmt: skip


def test_servers_at_the_chiefs_place_need_no_restart_of_the_whole_job() -> None:
    words = {"worker_pool_specs.0.container_spec.command": ["python", "t.py", "--role=ps"]}
    spec = changed(CLUSTER, {**words, "scheduling.restart_job_on_worker_restart": False})
    assert "VP407" not in codes(spec)
    assert "VP407" in codes(changed(spec, {"worker_pool_specs.0.container_spec.command": ["python", "t.py"]}))


def test_every_rule_has_two_fixtures() -> None:
    of_studies = {code for code in RULES if code.startswith("VP80")}  # tests/unit/vlmpipe/job_spec/test_study.py
    assert {case.code for case in CASES} | {code for code, *_ in WHOLE} == set(RULES) - of_studies


@pytest.mark.parametrize("spec", [CPU, ONE, REDUCED, TPU], ids=["CPU", "GPU", "Reduction Server", "TPU"])
def test_a_valid_job_of_each_kind_breaks_no_rule(spec: Spec) -> None:
    assert check(spec, "us-central1") == []


def accelerators_of(machine: Machine) -> list[tuple[str, int]]:
    without = [] if machine.accelerators_fixed else [("", 0)]
    return without + [(name, count) for name, counts in machine.accelerators.items() for count in counts]


def test_every_machine_of_the_catalogue_with_every_count_is_valid() -> None:
    cases = [(machine, *each) for machine in CATALOG.machines.values() for each in accelerators_of(machine)]
    assert {(case[0].machine_type, *case[1:]): found for case in cases if (found := _violations(*case))} == {}


def _violations(machine: Machine, accelerator: str, count: int) -> list[Violation]:
    def node(replica_count: int) -> Spec:
        spec = pool(machine.machine_type, accelerator, count, replica_count)
        if machine.needs_reservation:
            affinity = {"reservation_affinity_type": "SPECIFIC_RESERVATION", "key": "name", "values": ["mine"]}
            spec["machine_spec"]["reservation_affinity"] = affinity
        return spec | {"disk_spec": {"boot_disk_type": machine.boot_disk_types[0], "boot_disk_size_gb": 200}}

    strategies = ["STANDARD"] if machine.needs_reservation else ["STANDARD", "SPOT"]
    if accelerator and CATALOG.gpus[accelerator].flex_start:
        strategies.append("FLEX_START")
    region = next(iter(CATALOG.regions.get(accelerator, ("us-central1",))))
    specs = [changed(job(node(1), node(3)), {"scheduling.strategy": strategy}) for strategy in strategies]
    return [violation for spec in specs for violation in check(spec, region)]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_the_jobs_of_a_shipped_run_file_have_no_error(path: Path) -> None:
    config = load_run_file(path)
    for step in jobs_of(config):
        found = job_violations(config, step, "gs://example-bucket/runs/r1")
        assert [violation for violation in found if violation.severity == "error"] == []


def test_a_run_file_with_several_wrong_settings_gets_all_of_them_in_one_error() -> None:
    several = ["cluster.replica_count=2", "cluster.restart_job_on_worker_restart=true"]
    overrides = ["cluster.accelerator_count=4", "gcp.location=europe-west12", *several]
    config = load_run_file(ROOT / "configs/llava-13b-fsdp.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        check_jobs(config, "gs://example-bucket/runs/r1")
    text = str(caught.value)
    assert text.startswith("4 errors in the job specs\n")  # two settings, each in the chief's and the workers' pool
    assert "VP304" in text and "VP308" in text
    assert "(job cache-features, job train, job evaluate)" in text


def test_packages_are_held_to_the_python_that_ours_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"].startswith(f">={'.'.join(map(str, OLDEST_PYTHON))},")


def findings(*overrides: str) -> list[tuple[str, str]]:
    found = check_run(load_run_file(ROOT / "configs/digits.yaml", list(overrides)))
    return [(one.state, one.text) for one in found if one.subject.startswith("job ") and one.state != "ok"]


V100 = [
    "cluster.machine_type=n1-standard-8",
    "cluster.accelerator_type=NVIDIA_TESLA_V100",
    "cluster.accelerator_count=1",
]


@pytest.mark.parametrize(
    ("build", "expected", "remedy"),
    [
        ("cu130", "compute capability 7.5, 8.0, 8.6, 9.0, 10.0, 12.0", "cluster.torch_build=cu126"),
        ("cpu", "a build with CUDA", "cluster.torch_build=cu126"),
        ("cu126", "", ""),
    ],
)
def test_a_gpu_that_the_images_torch_has_no_code_for_is_an_error_with_a_remedy(
    build: str, expected: str, remedy: str
) -> None:
    found = findings(*V100, f"cluster.torch_build={build}")
    assert [text.startswith("VP606") and expected in text for _, text in found] == [True, True] * bool(expected)
    if remedy:
        assert f"write {remedy.replace('=', ': ')}" in found[0][1]
        assert findings(*V100, remedy) == []


def test_a_gpu_newer_than_the_images_torch_is_an_error() -> None:
    b200 = ["cluster.machine_type=a4-highgpu-8g", "cluster.accelerator_type=NVIDIA_B200", "cluster.accelerator_count=8"]
    config = load_run_file(ROOT / "configs/digits.yaml", [*b200, "cluster.torch_build=cu126"])
    assert "VP606" in {one.code for one in job_violations(config, "train", "gs://b/r")}
    fixed = load_run_file(ROOT / "configs/digits.yaml", b200)
    assert "VP606" not in {one.code for one in job_violations(fixed, "train", "gs://b/r")}


@pytest.mark.parametrize("build", ["", "cu128"])
def test_what_is_not_known_of_an_image_is_said_by_check_and_plan(build: str) -> None:
    overrides = [*V100, f"cluster.torch_build={build}"]
    found = findings(*overrides)
    assert [state for state, _ in found] == ["unchecked"] * 3
    assert "has code for NVIDIA_TESLA_V100 is not known" in found[0][1]
    notes = plan_run(load_run_file(ROOT / "configs/digits.yaml", overrides)).notes
    assert sum("has code for NVIDIA_TESLA_V100 is not known" in note for note in notes) == 1


def test_an_error_shared_by_several_jobs_is_reported_once() -> None:
    found = findings("cluster.machine_type=n1-standard-9", "cluster.replica_count=1")
    assert [(state, text[:5]) for state, text in found] == [("failed", "VP301")]
    assert "did you mean n1-standard-96?" in found[0][1] or "did you mean n1-standard-8?" in found[0][1]


def test_vertex_warnings_are_reported_for_run_files_that_can_run_there() -> None:
    image = "cluster.image_uri=docker.io/example/trainer:1"
    found = findings(*for_vertex([image]))
    assert [(state, text[:5]) for state, text in found] == [("warning", "VP604"), ("warning", "VP604")]
    assert findings(image) == []


def test_warnings_about_vertex_are_left_out_of_the_plan_of_a_job_that_goes_nowhere() -> None:
    assert plan_run(load_run_file(ROOT / "configs/digits.yaml")).findings == ()
    elsewhere = load_run_file(ROOT / "configs/digits.yaml", ["cluster.image_uri=docker.io/example/trainer:1"])
    assert {violation.code for violation in plan_run(elsewhere).findings} >= {"VP505", "VP604"}


def test_a_violation_names_the_right_value_and_its_source() -> None:
    (found,) = check(changed(ONE, {"worker_pool_specs.0.machine_spec.accelerator_count": 4}))
    assert found.as_dict() == {
        "code": "VP304",
        "severity": "error",
        "path": "job_spec.worker_pool_specs[0].machine_spec.accelerator_count",
        "found": "4",
        "expected": "8 on a2-highgpu-8g",
        "fix": "4 x NVIDIA_TESLA_A100 is on a2-highgpu-4g",
        "source": RULES["VP304"].source,
    }


def test_the_refusal_of_tpus_names_a_comparable_gpu_machine() -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", ["cluster.machine_type=ct5lp-hightpu-4t"])
    found, workers = [one for one in job_violations(config, "train", "gs://b/r") if one.severity == "error"]
    assert workers.code == "VP214"
    assert (found.code, found.found) == ("VP214", "TPUs (ct5lp-hightpu-4t) for vlmpipe.trainer.launch")
    assert found.fix == "a GPU machine of similar memory is a2-highgpu-2g with 2 x NVIDIA_TESLA_A100"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("ct6e-standard-1t", "a2-highgpu-1g with 1 x NVIDIA_TESLA_A100"),
        ("tpu7x-standard-4t", "a3-ultragpu-8g with 8 x NVIDIA_H200_141GB"),
        ("cloud-tpu", "a2-highgpu-2g with 2 x NVIDIA_TESLA_A100"),
    ],
)
def test_the_comparable_gpu_machine_has_at_least_the_memory(machine: str, expected: str) -> None:
    assert CATALOG.gpu_machine_like(machine) == expected


def test_too_few_reducers_are_answered_with_the_sufficient_number() -> None:
    config = load_run_file(
        ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", ["cluster.reduction_server.replica_count=2"]
    )
    (found,) = [one for one in job_violations(config, "train", "gs://b/r") if one.code == "VP215"]
    assert (found.severity, found.found) == ("warning", "2 reducers, 64 Gbit/s in total")
    assert (found.expected, found.fix) == ("at least the 400 Gbit/s of the 4 nodes", "write replica_count: 13")


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"worker_pool_specs.0.machine_spec.machine_type": "a2-highgpu-8gb"}, "did you mean a2-highgpu-8g?"),
        ({"worker_pool_specs.0.machine_spec.accelerator_type": "NVIDIA_A100_80G"}, "did you mean NVIDIA_A100_80GB?"),
        ({"scheduling.strategy": "flex_start"}, "did you mean FLEX_START?"),
        ({"service_acount": "a@b"}, "did you mean service_account?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_right_one(changes: dict[str, Any], hint: str) -> None:
    found = check(changed(ONE, changes))
    assert hint in found[0].expected + found[0].fix


def test_problems_of_all_kinds_are_found_at_once() -> None:
    broken = {
        "VP104": {"worker_pool_specs.0.machine_spec.accelerator_count": 4.5},
        "VP108": {"scheduling.timeout": "24h"},
        "VP106": {"scheduling.strategy": "SPOTTY"},
        "VP203": {"worker_pool_specs.0.replica_count": 4},
        "VP311": {"worker_pool_specs.0.disk_spec.boot_disk_size_gb": 20},
        "VP502": {"network": "default"},
        "VP505": {"service_account": ""},
        "VP602": {"worker_pool_specs.0.container_spec.image_uri": "gcr.io/example-project/trainer"},
        "VP704": {"worker_pool_specs.0.container_spec.args": ["--rank=$RANK"]},
    }
    spec = ONE
    for changes in broken.values():
        spec = changed(spec, changes)
    assert sorted(codes(spec)) == sorted(broken)


def test_the_reference_page_is_what_the_rules_say() -> None:
    assert RULES_PAGE.read_text(encoding="utf-8") == job_spec_rules_page(), GENERATE


def test_every_rule_has_a_source() -> None:
    for rule in RULES.values():
        assert rule.source and rule.title and rule.severity in ("error", "warning")


def test_the_fields_are_those_of_the_installed_api_client() -> None:
    assert FIELDS_FILE.read_text(encoding="utf-8") == fields_json(), GENERATE


# Secrets


@pytest.mark.parametrize("path", list(leaves(REDUCED)), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("as_name", [False, True])
def test_a_secret_in_any_place_is_never_printed(path: tuple[Any, ...], as_name: bool) -> None:
    place = ".".join(map(str, path[:-1] if as_name and isinstance(path[-1], str) else path))
    key = f"{place}.{HUB_TOKEN}" if as_name and isinstance(path[-1], str) and place else place
    found = check(changed(REDUCED, {key: HUB_TOKEN} if place else {HUB_TOKEN: 1}))
    assert all(HUB_TOKEN not in repr(violation) for violation in found)


# Whatever comes


FIELD_NAMES = sorted({name for fields in load_fields()["messages"].values() for name in fields})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["SPOT", "FLEX_START", "3600s", "a2-highgpu-8g", "NVIDIA_L4", "reductionserver", "$RANK"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=300 if short_form.WHOLE else 60, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_no_content_makes_the_rules_fail(content: Any) -> None:
    for violation in check(content, "us-central1"):
        assert violation.severity == RULES[violation.code].severity


@settings(max_examples=300 if short_form.WHOLE else 60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(leaves(REDUCED))), st.integers(1, 6), JSON)
def test_no_value_in_any_place_of_a_job_makes_the_rules_fail(path: tuple[Any, ...], depth: int, content: Any) -> None:
    for violation in check(changed(REDUCED, {".".join(map(str, path[:depth])): content}), "us-central1"):
        assert violation.path.startswith("job_spec")
