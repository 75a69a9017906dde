"""A node's GPUs beside what its job's spec buys: every chain from torch's answer to the sentence, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda import L4, NO_KERNEL, OLD_DRIVER, FakeCuda
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.preflight import gpus as gpus_module
from vlmpipe.trainer.preflight import machine, nvml
from vlmpipe.trainer.preflight.bought import VARIABLE, BoughtMachine, bought_machine
from vlmpipe.trainer.preflight.gpus import FoundGpus, examine, look, main
from vlmpipe.trainer.preflight.machine import missing, require_machine
from vlmpipe.trainer.storage.records import read_record_file

BOUGHT = BoughtMachine(
    step="train",
    machine_type="g2-standard-24",
    accelerator_type="NVIDIA_L4",
    accelerator_count=2,
    device="L4",
    gpu_memory_gib=22.49,
    compute_capability=8.9,
    boot_disk_size_gb=100,
)
DRIVER = "560.35.03"
BOTH = FakeCuda(gpus=[L4, L4])


def found(cuda: FakeCuda, driver: str = DRIVER) -> FoundGpus:
    return examine(cuda, driver=driver)


def sentences(cuda: FakeCuda, *, driver: str = DRIVER, disk_gb: int = 95, **bought: Any) -> list[str]:
    wanted = BOUGHT.model_copy(update=bought)
    return [finding.line() for finding in missing(wanted, found(cuda, driver), disk_gb * 10**9, exact=True)]


def test_the_machine_that_was_bought_lacks_nothing() -> None:
    assert sentences(BOTH) == []


@pytest.mark.parametrize(
    ("cuda", "driver", "said", "fix"),
    [
        (FakeCuda(cuda=""), "", "torch sees none: No CUDA GPUs are available", "this is a build for CPUs"),
        (FakeCuda(), "", "NVIDIA's driver not found", "/usr/local/nvidia/lib64"),
        (FakeCuda(cuda="13.0", error=OLD_DRIVER), DRIVER, "CUDA 13.0 needs driver 580 or newer", "for an older CUDA"),
        (FakeCuda(), DRIVER, "torch sees none: No CUDA GPUs are available", "start the job on another machine"),
        (
            FakeCuda(gpus=[L4]),
            DRIVER,
            "2 x NVIDIA_L4 (g2-standard-24) is paid for, and torch sees 1",
            "another machine",
        ),
        (
            FakeCuda(gpus=[L4, L4], wrong=frozenset({1})),
            DRIVER,
            "GPU 1 (NVIDIA L4): a matrix product came out wrong",
            "start the job again",
        ),
        (FakeCuda(gpus=[L4, L4], broken={0: "CUDA error: uncorrectable ECC error"}), DRIVER, "ECC", "another machine"),
    ],
    ids=["CPU build", "no driver library", "old driver", "no GPU", "one of two", "wrong product", "broken"],
)
def test_what_is_missing_is_said_with_its_reason_and_its_remedy(
    cuda: FakeCuda, driver: str, said: str, fix: str
) -> None:
    (sentence,) = sentences(cuda, driver=driver)
    assert said in sentence and fix in sentence


def test_a_gpu_without_code_is_named_with_what_torch_has_code_for() -> None:
    v100 = ("Tesla V100-SXM2-16GB", 16384 << 20, (7, 0))
    said = sentences(FakeCuda(gpus=[v100, v100], broken={0: NO_KERNEL, 1: NO_KERNEL}), device="V100", gpu_memory_gib=16)
    assert len(said) == 1 and "no code for Tesla V100-SXM2-16GB (compute capability 7.0)" in said[0]
    assert "sm_80, sm_86, sm_90" in said[0]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (("NVIDIA L40S", 46068 << 20, (8, 9)), ["the GPUs here are NVIDIA L40S"]),
        (("Tesla T4", 15360 << 20, (7, 5)), ["Tesla T4 has 15.0 GiB of memory", "the GPUs here are Tesla T4"]),
        (("NVIDIA L4", 11000 << 20, (8, 9)), ["NVIDIA L4 has 10.7 GiB of memory"]),
    ],
)
def test_other_gpus_than_those_bought_are_named(gpu: tuple[str, int, tuple[int, int]], said: list[str]) -> None:
    assert [text.partition(";")[0] for text in sentences(FakeCuda(gpus=[gpu, gpu]))] == said


@pytest.mark.parametrize(("float8", "capability", "count"), [(True, (8, 6), 1), (True, (9, 0), 0), (False, (8, 6), 0)])
def test_a_gpu_without_products_of_8_bit_floats_is_named_before_training(
    float8: bool, capability: tuple[int, int], count: int
) -> None:
    gpu = ("NVIDIA RTX A6000", 49140 << 20, capability)
    wanted = BOUGHT.model_copy(update={"float8": float8})
    findings = [one for one in missing(wanted, found(FakeCuda(gpus=[gpu, gpu])), 0, exact=False) if one.certain]
    assert len(findings) == count
    for finding in findings:
        assert finding.found == "train.float8 does not work on NVIDIA RTX A6000, of compute capability 8.6"
        assert "set train.float8 to none" in finding.fix


@pytest.mark.parametrize(
    ("gpu", "certain"),
    [
        (("NVIDIA RTX A6000", 49140 << 20, (8, 6)), {"the GPUs here are NVIDIA RTX A6000": False}),
        (
            ("NVIDIA RTX A4000", 16376 << 20, (8, 6)),
            {"NVIDIA RTX A4000 has 16.0 GiB of memory": True, "the GPUs here are NVIDIA RTX A4000": False},
        ),
    ],
)
def test_a_clusters_own_gpus_are_compared_as_far_as_they_can_be(
    gpu: tuple[str, int, tuple[int, int]], certain: dict[str, bool]
) -> None:
    """Kinds that accelerator_type has no word for start without machine_check warn, if they hold what was planned."""
    there = found(FakeCuda(gpus=[gpu, gpu]))
    findings = [*missing(BOUGHT, there, 0, exact=False)]
    assert {finding.found: finding.certain for finding in findings} == certain
    assert all("number and memory of the GPUs were compared" in one.expected for one in findings if not one.certain)
    assert all(finding.certain for finding in missing(BOUGHT, there, 10**12, exact=True)), "Vertex AI sells the kind"


@pytest.mark.parametrize(("disk_gb", "count"), [(49, 1), (51, 0)])
def test_a_disk_of_less_than_half_the_size_is_missing(disk_gb: int, count: int) -> None:
    there = found(BOTH)
    findings = [*missing(BOUGHT, there, disk_gb * 10**9, exact=True)]
    assert [finding.certain for finding in findings] == [False] * count, "no document says what a container sees"
    assert not list(missing(BOUGHT, there, disk_gb * 10**9, exact=False)), "on Kubeflow the spec buys no disk"


@pytest.mark.parametrize(
    ("accelerator_type", "name"),
    [
        ("NVIDIA_TESLA_A100", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA_A100_80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA_H100_80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA_H100_MEGA_80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA_H200_141GB", "NVIDIA H200"),
        ("NVIDIA_TESLA_T4", "Tesla T4"),
        ("NVIDIA_TESLA_V100", "Tesla V100-SXM2-16GB"),
        ("NVIDIA_RTX_PRO_6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_names_of_drivers_are_those_of_the_catalogue_and_of_no_other_kind(accelerator_type: str, name: str) -> None:
    catalog = load_catalog().gpus
    mine = catalog[accelerator_type]
    assert machine._is(mine.device, name)
    others = {gpu.device for gpu in catalog.values()} - {mine.device}
    assert not [device for device in others if machine._is(device, name)]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FoundGpus]]:
    """What the node has, in place of a look at it."""
    answers: list[FoundGpus] = [found(FakeCuda())]
    monkeypatch.setattr(machine, "look", lambda **_: answers[0])
    machine._looked_at.cache_clear()
    yield answers
    machine._looked_at.cache_clear()


def test_a_node_without_its_gpus_ends_with_its_own_code_and_leaves_its_records(
    tmp_path: Path, looked: list[FoundGpus], capfd: pytest.CaptureFixture[str]
) -> None:
    environment = {VARIABLE: BOUGHT.model_dump_json(), "CLUSTER_SPEC": "{}"}
    with pytest.raises(UserError, match="torch sees none") as caught:
        require_machine(environment, run_uri=str(tmp_path), node=3)
    assert caught.value.code == ExitCode.MACHINE and "cluster.machine_check=warn" in caught.value.fix
    (node,) = read_record_file(tmp_path / "preflight.json")["nodes"]
    assert node["node"] == 3 and node["machine"]["missing"][0]["found"] in caught.value.found
    assert read_record_file(tmp_path / "steps/train.json")["state"] == "failed"
    assert "machine: 2 x NVIDIA_L4 (g2-standard-24) is paid for; here are 0 GPUs (none)" in capfd.readouterr().out


def test_what_ends_the_job_is_said_before_what_is_a_warning(tmp_path: Path, looked: list[FoundGpus]) -> None:
    looked[0] = found(FakeCuda(gpus=[("NVIDIA RTX A6000", 49140 << 20, (8, 6))] * 2))
    assert require_machine({VARIABLE: BOUGHT.model_dump_json()}, run_uri=str(tmp_path)), "a warning alone"
    with pytest.raises(UserError) as caught:  # no CUDA build of torch here, so no NCCL for the reducers
        require_machine({VARIABLE: BOUGHT.model_copy(update={"reducers": 4}).model_dump_json()}, run_uri=str(tmp_path))
    first, *others = caught.value.found.splitlines()
    assert "nccl" in first.lower() and "also:     the GPUs here are NVIDIA RTX A6000" in others[0]


def test_a_run_that_only_wants_a_warning_starts(tmp_path: Path, looked: list[FoundGpus]) -> None:
    environment = {VARIABLE: BOUGHT.model_copy(update={"check": "warn"}).model_dump_json()}
    report = require_machine(environment, run_uri=str(tmp_path))
    assert report and len(report.missing) == 1 and not (tmp_path / "steps").exists()


def test_nothing_is_looked_at_where_nothing_is_bought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "look", lambda **_: pytest.fail("looked"))
    assert require_machine({}, run_uri=str(tmp_path)) is None


def test_reducers_whose_plugin_nccl_ignores_are_missing_too(tmp_path: Path, looked: list[FoundGpus]) -> None:
    looked[0] = found(BOTH)
    bought = BOUGHT.model_copy(update={"reducers": 4, "boot_disk_size_gb": 0})
    with pytest.raises(UserError) as caught:  # no CUDA build of torch here, so no NCCL
        require_machine({VARIABLE: bought.model_dump_json()}, run_uri=str(tmp_path))
    assert caught.value.code == ExitCode.MACHINE and "nccl" in caught.value.found.lower()


@pytest.mark.parametrize("check", ["fail", "warn"])
def test_gpus_that_do_not_answer_are_recorded_and_warned_of_as_what_lacks(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[FoundGpus]
) -> None:
    def hangs(**_: Any) -> FoundGpus:
        raise UserError("the GPUs did not answer within 300 s", code=ExitCode.MACHINE)

    monkeypatch.setattr(machine, "look", hangs)
    environment = {VARIABLE: BOUGHT.model_copy(update={"check": check}).model_dump_json()}
    if check == "warn":
        report = require_machine(environment, run_uri=str(tmp_path))
        assert report and report.missing[0].found.startswith("the GPUs did not answer")
        return
    with pytest.raises(UserError, match="did not answer within 300 s"):
        require_machine(environment, run_uri=str(tmp_path))
    assert read_record_file(tmp_path / "steps/train.json")["detail"]["exit_code"] == ExitCode.MACHINE


def test_a_text_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        bought_machine({VARIABLE: BOUGHT.model_dump_json().replace('"version":1', '"version":2')})


def test_what_the_process_prints_is_what_its_parent_reads(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rates"], FakeCuda(gpus=[L4]))
    read = FoundGpus.parse(capsys.readouterr().out)
    (gpu,) = read.gpus
    assert gpu.tflops and gpu.tflops > 0
    assert replace(read, gpus=(), driver="") == replace(found(FakeCuda(gpus=[L4]), ""), gpus=())
    assert asdict(replace(gpu, tflops=None)) == asdict(found(FakeCuda(gpus=[L4])).gpus[0])


@pytest.mark.parametrize(
    ("program", "timeout_s", "said"),
    [("import time; time.sleep(60)", 0.2, "did not answer within 0.2 s"), ("exit('boom')", 60, "code 1: boom")],
)
def test_a_look_that_hangs_or_dies_ends_the_job(program: str, timeout_s: float, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        look(command=[sys.executable, "-c", program], timeout_s=timeout_s)
    assert caught.value.code == ExitCode.MACHINE


def test_a_look_that_hangs_in_the_kernel_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, SIGKILL does not end a process: to wait for it would pay for the machine until the job's own limit."""
    monkeypatch.setattr(gpus_module, "KILL_S", 0.0)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left.append(process))
    left: list[subprocess.Popen[str]] = []
    try:
        with pytest.raises(UserError, match="did not answer within"):
            look(command=[sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.1)
    finally:
        monkeypatch.undo()
        for process in left:
            with process:
                process.kill()
    assert left


def test_the_driver_is_read_from_the_kernel_where_its_library_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\nGCC version: 12.2.0"
    )
    monkeypatch.setattr(nvml, "DRIVER_FILE", tmp_path / "version")
    assert nvml.driver_version() == ""
    (tmp_path / "version").write_text(said)
    assert nvml.driver_version() == "550.90.07"


@pytest.mark.parametrize(
    ("listed", "files", "said"),
    [
        ([L4, L4], 0, []),
        (None, 2, []),
        (None, 1, ["2 x NVIDIA_L4 (g2-standard-24) is paid for, and NVIDIA's library sees 1 (no torch"]),
        (
            [],
            0,
            ["2 x NVIDIA_L4 (g2-standard-24) is paid for, and NVIDIA's library sees none: neither NVIDIA's library"],
        ),
        ([("Tesla T4", 15360 << 20, (7, 5))] * 2, 2, ["Tesla T4 has 15.0 GiB of memory", "the GPUs here are Tesla T4"]),
    ],
)
def test_an_image_without_torch_is_compared_by_what_the_driver_lists(
    listed: list[tuple[str, int, tuple[int, int]]] | None, files: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_module, "devices", lambda: listed)
    monkeypatch.setattr(gpus_module, "driver_version", lambda: DRIVER)
    monkeypatch.setattr(gpus_module.glob, "glob", lambda _pattern: [f"/dev/nvidia{number}" for number in range(files)])
    there = gpus_module.without_torch()
    found_there = [finding.found for finding in missing(BOUGHT, there, 95 * 10**9, exact=True)]
    assert len(found_there) == len(said) and all(
        text.startswith(start) for text, start in zip(found_there, said, strict=True)
    )


def test_a_process_without_torch_lists_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus_module.importlib.util, "find_spec", lambda name: None)
    main([])
    assert FoundGpus.parse(capsys.readouterr().out).torch == ""


def test_a_torch_for_cpus_beside_another_library_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs in JAX or TensorFlow often have one, to read data."""
    monkeypatch.setattr(gpus_module, "devices", lambda: [L4, L4])
    main(["--any-program"], FakeCuda(cuda=""))
    listed = FoundGpus.parse(capsys.readouterr().out)
    assert [*missing(BOUGHT, listed, 95 * 10**9, exact=True)] == []
    main(["--any-program"], FakeCuda(gpus=[L4]))
    assert FoundGpus.parse(capsys.readouterr().out).torch, "a torch with CUDA is"
