"""Fast checks of a node for failures that otherwise appear minutes later or without a clear cause.

The launcher runs `check_node` and `announce`; `vlmpipe.trainer.distributed.collectives.check_ranks` writes the reports
of all nodes to `<run>/preflight.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vlmpipe.trainer.checkpoint.staging import sweep_staging
from vlmpipe.trainer.distributed.cluster_env import REPORT_VARIABLE
from vlmpipe.trainer.errors import ExitCode, UserError, print_warning
from vlmpipe.trainer.preflight.bought import BoughtMachine
from vlmpipe.trainer.preflight.devices import visible_gpus
from vlmpipe.trainer.preflight.machine import MachineReport
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage

GIB = 1 << 30
# Containers often get 64 MiB, and a CustomJob has no field for it. NCCL and data workers need more:
# googleapis/python-aiplatform#3434, kubeflow/pipelines#9147.
SHARED_MEMORY_MIN_BYTES = GIB
SHARED_MEMORY = Path("/dev/shm")
CLOCK_SKEW_MAX_S = 60.0  # disorders the logs of nodes; from 15 minutes on, signed requests are refused
CLOCK_TIMEOUT_S = 5.0
NO_OBJECT = "vlmpipe-preflight"
# DeepSpeed builds extensions at first use, in minutes. Later builds wait forever for the lock of a killed one.
BUILD_MAX_S = 1800.0


@dataclass
class NodeReport:
    """Findings on one node. `clock_ahead_s` is None for a local store."""

    node: int
    free_bytes: int
    shared_memory_bytes: int | None = None
    output_s: float | None = None  # to write, read and delete a small object
    clock_ahead_s: float | None = None
    swept: int = 0  # deleted folders of killed processes
    machine: dict[str, object] | None = (
        None  # vlmpipe.trainer.preflight.machine; None where nothing is bought for the node
    )
    warnings: list[str] = field(default_factory=list)
    denied: list[dict[str, str]] = field(default_factory=list)  # found, expected, fix of each address it may not read

    def line(self) -> str:
        """For people: the findings."""
        parts = [f"{self.free_bytes / GIB:,.1f} GiB free for temporary files"]
        if self.swept:
            parts.append(f"{self.swept} folders of killed processes deleted there")
        if self.shared_memory_bytes is not None:
            parts.append(f"{self.shared_memory_bytes / GIB:,.1f} GiB of shared memory")
        if self.output_s is not None:
            parts.append(f"output written and read in {1000 * self.output_s:,.0f} ms")
        if self.clock_ahead_s is not None:
            parts.append(f"clock within {abs(self.clock_ahead_s):,.1f} s")
        return f"preflight: {', '.join(parts)}"


def check_node(run_uri: str, node: int, machine: MachineReport | None = None) -> NodeReport:
    """Check this machine and its access to the run's folder ("" checks the machine only).

    Raises UserError: 73 without room, 77 without permission, 69 when the store does not answer or answers wrongly.
    """
    swept = sweep_staging()  # before measuring free space
    report = NodeReport(node, shutil.disk_usage(tempfile.gettempdir()).free, swept=swept)
    if machine:
        report.machine = machine.as_dict()
        report.warnings += [finding.line() for finding in machine.missing]
    if visible_gpus(os.environ):
        _check_shared_memory(report)
    _check_extension_locks(report)
    if run_uri:
        store = open_storage(run_uri)
        _check_output(store, report)
        if machine:
            _check_reads(machine.bought, report)
        if not isinstance(store, LocalStorage):
            _check_clock(report)
    return report


def announce(report: NodeReport) -> None:
    """Print the report and pass it to this node's ranks."""
    print(report.line(), flush=True)
    for warning in report.warnings:
        print_warning(warning, step="preflight")
    os.environ[REPORT_VARIABLE] = json.dumps(asdict(report))


def _check_shared_memory(report: NodeReport) -> None:
    report.shared_memory_bytes = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if report.shared_memory_bytes < SHARED_MEMORY_MIN_BYTES:
        report.warnings.append(
            f"{SHARED_MEMORY} has {report.shared_memory_bytes / (1 << 20):,.0f} MiB: NCCL between this machine's GPUs "
            "may fail (NCCL_SHM_DISABLE=1 does without, slower; docker run --shm-size=8g gives more)"
        )


def _check_extension_locks(report: NodeReport) -> None:
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions"))
    for lock in folder.glob("**/lock"):
        with contextlib.suppress(FileNotFoundError):  # a build that has just ended
            age_s = time.time() - lock.stat().st_mtime
            if age_s > BUILD_MAX_S:
                report.warnings.append(
                    f"{lock} is {age_s / 60:,.0f} minutes old: a build of DeepSpeed's extensions was killed, and the "
                    "next one waits for it forever; delete it"
                )


def _check_output(store: Storage, report: NodeReport) -> None:
    name, data = f"preflight-{report.node}-{secrets.token_hex(6)}", secrets.token_bytes(64)
    started_s = time.monotonic()
    store.create(name, data)
    read = store.read(name)
    try:
        store.write(name, data)  # as a job writes its records, again and again
        store.delete(name)
    except UserError as error:
        if error.code != ExitCode.NO_PERMISSION:
            raise
        raise UserError(
            f"{error.found}, which this account may create",
            expected=error.expected or "an account that may also replace and delete what it has written",
            fix="records of a run are replaced, and old checkpoints and exports deleted: "
            f"{error.fix or 'give the account these permissions'}",
            code=ExitCode.NO_PERMISSION,
        ) from error
    report.output_s = time.monotonic() - started_s
    if read != data:
        raise UserError(
            f"{store.uri(name)} was read back with other bytes than were written",
            expected="a store that returns what was written to it",
            fix="check the disk or the mount under output.root_uri",
            code=ExitCode.UNAVAILABLE,
        )


def _check_reads(bought: BoughtMachine, report: NodeReport) -> None:
    """Raise UserError (77) for an address that this job's account, or a later job's, which has the same, may not read.

    Asked is the object itself, because a grant may be of one folder only; what is not there is not found by who may
    list its bucket. A warning with cluster.machine_check warn, as what the machine lacks.
    """
    for address in bought.reads:
        bucket, _, name = address.removeprefix("gs://").partition("/")
        try:
            open_storage(f"gs://{bucket}").stat(name.rstrip("/") or NO_OBJECT)
        except UserError as error:
            if error.code != ExitCode.NO_PERMISSION:
                raise
            if bought.check == "fail":
                fix = f"{error.fix}\ncluster.machine_check=warn starts the job all the same"
                raise UserError(error.found, expected=error.expected, fix=fix, code=error.code) from error
            report.denied.append({"found": error.found, "expected": error.expected, "fix": error.fix})
            report.warnings.append(error.found)


def _check_clock(report: NodeReport) -> None:
    """Compare this clock with the store's, from the Date header of an answer."""
    import email.utils  # slow imports that a local run does not need
    import urllib.error
    import urllib.request

    address = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
    request = urllib.request.Request(address, method="HEAD")
    asked_s = time.time()
    try:
        with urllib.request.urlopen(request, timeout=CLOCK_TIMEOUT_S) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # an answer all the same
        date = error.headers["Date"]
    except OSError as error:
        report.warnings.append(f"{address} does not tell the time: {error}")
        return
    if date:
        there_s = email.utils.parsedate_to_datetime(date).timestamp() + 0.5
        report.clock_ahead_s = (asked_s + time.time()) / 2 - there_s
        if abs(report.clock_ahead_s) > CLOCK_SKEW_MAX_S:
            side = "ahead of" if report.clock_ahead_s > 0 else "behind"
            report.warnings.append(
                f"this machine's clock is {abs(report.clock_ahead_s):,.0f} s {side} the store's: set it (NTP), or "
                "signed requests may be refused and logs cannot be put in order"
            )
