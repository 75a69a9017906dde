"""Compares a job's machine with its spec, before anything else is done.

Each check answers with a sentence: what was found, what was expected and what to do. A machine that lacks something
ends the job in seconds with exit code 78; with cluster.machine_check warn the job continues, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from vlmpipe.trainer.config.compiling import MIN_FOR_FLOAT8
from vlmpipe.trainer.distributed.cuda_builds import architectures_of, driver_runs, has_code_for, min_driver
from vlmpipe.trainer.distributed.nccl_plugin import check_plugin
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight.bought import BoughtMachine, bought_machine
from vlmpipe.trainer.preflight.gpus import FoundGpu, FoundGpus, look
from vlmpipe.trainer.preflight.record import record_failure

GIB, GB = 1 << 30, 10**9
# ECC and the driver take a share of a GPU's memory; the next smaller GPU of the same kind has half or less.
MEMORY_SHARE = 0.9
# What an image and a file system take of a boot disk. Which part of it a container sees is documented nowhere.
DISK_SHARE = 0.5
# Where INDEX has torch for CUDA 12.6; the first command writes its versions once.
OLDER_CUDA = (
    "python container/pin_torch.py cu126 --index-url INDEX, then make build TORCH_BUILD=cu126 TORCH_INDEX_URL=INDEX"
)


@dataclass(frozen=True)
class Finding:
    """Something that the machine lacks. Not `certain` where the platform does not say how to see it: a warning."""

    found: str
    expected: str
    fix: str
    certain: bool = True

    def line(self) -> str:
        """The finding in one sentence, as for a warning."""
        return f"{self.found}; expected {self.expected}; to do: {self.fix}"


@dataclass(frozen=True)
class MachineReport:
    """Machine that was bought for this node, the one that is there, and what lacks."""

    bought: BoughtMachine
    gpus: FoundGpus
    disk_bytes: int
    missing: tuple[Finding, ...] = field(default=())

    def as_dict(self) -> dict[str, object]:
        """For preflight.json."""
        return {
            "bought": self.bought.model_dump(),
            "gpus": asdict(self.gpus),
            "disk_bytes": self.disk_bytes,
            "missing": [asdict(finding) for finding in self.missing],
        }

    def line(self) -> str:
        """For people."""
        names = " + ".join(sorted({gpu.name or "unknown" for gpu in self.gpus.gpus})) or "none"
        driver = f"driver {self.gpus.driver or 'unknown'}"
        return (
            f"machine: {self.bought.named()} is paid for; here {_are(len(self.gpus.gpus))} ({names}), {driver}, "
            f"{_torch(self.gpus)}"
        )


def require_machine(
    environment: Mapping[str, str], *, run_uri: str, node: int = 0, step: str = ""
) -> MachineReport | None:
    """Check this node; None where nothing is bought for it, which is so on this machine.

    step: whose record gets the error; empty takes the spec's.

    Raises UserError (78) that says what the machine lacks, after the run's records got it.
    """
    bought = bought_machine(environment)
    if bought is None:
        return None
    report = _looked_at(bought, exact="CLUSTER_SPEC" in environment)  # which Vertex AI alone sets
    print(report.line(), flush=True)
    if bought.check == "fail" and any(finding.certain for finding in report.missing):
        error = _error(report)
        with contextlib.suppress(UserError):  # the bucket may be out of reach as well: the machine is the cause
            record_failure(run_uri, step or bought.step, node, report.as_dict(), error)
        raise error
    return report


@functools.cache
def _looked_at(bought: BoughtMachine, *, exact: bool) -> MachineReport:
    """Once a process: a sweep's launcher starts several trainings."""
    disk_bytes = shutil.disk_usage(tempfile.gettempdir()).total
    try:
        gpus = look(any_program=bought.any_program, timeout_s=bought.look_timeout_s)
    except UserError as error:  # recorded as what a machine lacks, and no more than a warning where that is one
        nothing = FoundGpus("", "", "", (), "", error.found, ())
        return MachineReport(bought, nothing, disk_bytes, (Finding(error.found, error.expected, error.fix),))
    findings = [*missing(bought, gpus, disk_bytes, exact=exact)]
    if bought.reducers and gpus.cuda:  # an image without torch has an NCCL of its own
        findings += _ignored_plugin()
    return MachineReport(bought, gpus, disk_bytes, tuple(findings))


def _ignored_plugin() -> list[Finding]:
    """Where NCCL would not load the Reduction Server's plugin, the reducers are paid for and idle."""
    try:
        check_plugin(os.environ)
    except UserError as error:
        return [Finding(error.found, error.expected, error.fix)]
    return []


def missing(bought: BoughtMachine, gpus: FoundGpus, disk_bytes: int, *, exact: bool) -> Iterator[Finding]:
    """Differences of the machine from the bought one.

    exact: the platform starts the very machine and disk that the spec names, as Vertex AI does. A Kubernetes cluster
    has its own, with GPUs that the catalogue may not know: another kind is then a warning, less memory is not.
    """
    if len(gpus.gpus) < bought.accelerator_count:
        yield _too_few(bought, gpus)
    for check in (_faulty, _without_code, _without_float8, _too_small):
        if finding := check(bought, gpus):
            yield finding
    if finding := _other_kind(bought, gpus, exact=exact):
        yield finding
    if exact and disk_bytes < DISK_SHARE * bought.boot_disk_size_gb * GB:
        yield Finding(
            f"the disk under {tempfile.gettempdir()} has {disk_bytes / GB:,.0f} GB",
            f"a boot disk of {bought.boot_disk_size_gb:,} GB (cluster.boot_disk_size_gb)",
            "set TMPDIR in cluster.env to a folder of the large disk, if there is one: checkpoints need room there",
            certain=False,
        )


def _are(count: int) -> str:
    return "is 1 GPU" if count == 1 else f"are {count} GPUs"


def _torch(gpus: FoundGpus) -> str:
    return f"torch {gpus.torch} for CUDA {gpus.cuda or 'none'}" if gpus.torch else "no torch"


def _too_few(bought: BoughtMachine, gpus: FoundGpus) -> Finding:
    count, who = len(gpus.gpus), "torch" if gpus.torch else "NVIDIA's library"
    seen = f"{who} sees {count}" if count else f"{who} sees none: {gpus.reason}"
    requested = bought.accelerator_count
    expected = f"{requested} GPU{'s' if requested > 1 else ''} that {who} sees"
    versions = f"{_torch(gpus)}, NVIDIA's driver {gpus.driver or 'not found'}"
    if gpus.torch and not gpus.cuda:
        fix = "build the trainer image with make build: its torch has CUDA; this is a build for CPUs"
    elif not gpus.driver:
        fix = (
            "the driver's libraries are not found: on Vertex AI and GKE they lie in /usr/local/nvidia/lib64, which "
            "LD_LIBRARY_PATH of the image must name, as images of make build do. If it does, start the job on another "
            "machine"
        )
    elif driver_runs(gpus.driver, gpus.cuda) is False:
        expected += f"; CUDA {gpus.cuda} needs driver {min_driver(gpus.cuda)} or newer"
        fix = f"build the trainer image for an older CUDA: {OLDER_CUDA}"
    else:
        fix = "start the job on another machine; nvidia-smi there says more"
    return Finding(f"{bought.named()} is paid for, and {seen} ({versions})", expected, fix)


def _faulty(_bought: BoughtMachine, gpus: FoundGpus) -> Finding | None:
    faults = [f"GPU {index} ({gpu.name}): {gpu.fault}" for index, gpu in enumerate(gpus.gpus) if gpu.fault]
    if not faults or _unsupported(gpus):
        return None
    fix = "start the job again: on Vertex AI it gets another machine; a broken GPU is worth a word to the provider"
    return Finding("; ".join(faults), "a right matrix product on each GPU", fix)


def _without_code(_bought: BoughtMachine, gpus: FoundGpus) -> Finding | None:
    if not (unsupported := _unsupported(gpus)):
        return None
    gpu = unsupported[0]
    return Finding(
        f"torch {gpus.torch} has no code for {gpu.name} (compute capability {_capability(gpu)})",
        f"one of {', '.join(gpus.arch_list)}",
        f"take a GPU of that list, or build an image whose CUDA still has code for it: {OLDER_CUDA}",
    )


def _without_float8(bought: BoughtMachine, gpus: FoundGpus) -> Finding | None:
    older = [gpu for gpu in gpus.gpus if gpu.name and _capability(gpu) < MIN_FOR_FLOAT8]
    if not (bought.float8 and older):
        return None
    return Finding(
        f"train.float8 does not work on {older[0].name}, of compute capability {_capability(older[0])}",
        f"{MIN_FOR_FLOAT8} or newer: L4, H100, H200, B200",
        "set train.float8 to none, or take another cluster.accelerator_type",
    )


def _unsupported(gpus: FoundGpus) -> list[FoundGpu]:
    """GPUs that cannot run this torch: a product fails there, and torch has no code for them. PTX may serve others."""
    architectures = architectures_of(gpus.arch_list)
    return [gpu for gpu in gpus.gpus if gpu.fault and not has_code_for(architectures, _capability(gpu))]


def _capability(gpu: FoundGpu) -> float:
    return float(f"{gpu.capability[0]}.{gpu.capability[1]}")


def _other_kind(bought: BoughtMachine, gpus: FoundGpus, *, exact: bool) -> Finding | None:
    others = sorted({gpu.name for gpu in gpus.gpus if gpu.name and not _is(bought.device, gpu.name)})
    if not bought.device or not others:
        return None
    finding = f"the GPUs here are {', '.join(others)}"
    if exact:
        expected = f"{bought.accelerator_type}, by which the run was planned and is paid for"
        return Finding(finding, expected, "correct cluster.accelerator_type, so that the plan is that of these GPUs")
    expected = f"{bought.accelerator_type}, whose speed the plan takes; number and memory of the GPUs were compared"
    fix = "set cluster.accelerator_type to their own type if it has one, or kubeflow.node_selector to other nodes"
    return Finding(finding, expected, fix, certain=False)


def _is(device: str, name: str) -> bool:
    """Return whether a device's name holds the word: "L4" is not in "NVIDIA L40S"."""
    return bool(re.search(rf"\b{re.escape(device)}\b", name))


def _too_small(bought: BoughtMachine, gpus: FoundGpus) -> Finding | None:
    min_bytes = MEMORY_SHARE * bought.gpu_memory_gib * GIB
    small = [gpu for gpu in gpus.gpus if gpu.name and gpu.memory_bytes < min_bytes]
    if not small:
        return None
    return Finding(
        f"{small[0].name} has {small[0].memory_bytes / GIB:,.1f} GiB of memory",
        f"{bought.gpu_memory_gib:,.1f} GiB, that of {bought.accelerator_type}",
        "correct cluster.accelerator_type and plan again; a slice of a GPU (MIG) has less memory than the GPU",
    )


def _error(report: MachineReport) -> UserError:
    first, *others = sorted(report.missing, key=lambda finding: not finding.certain)
    findings = "\n".join([first.found, *(f"  also:     {other.line()}" for other in others)])
    fix = f"{first.fix}\ncluster.machine_check=warn starts the job all the same"
    return UserError(findings, expected=first.expected, fix=fix, code=ExitCode.MACHINE)
