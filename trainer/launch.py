"""Launches one node of a distributed job from CLUSTER_SPEC or PET_*, by torchrun, and returns a meaningful exit code.

python -m vlmpipe.trainer.launch --nproc-per-node auto -- vlmpipe.trainer.train --config gs://bucket/runs/1/run.json
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vlmpipe.trainer.distributed.cluster_env import LAUNCHED_VARIABLE, NODE_LEVEL_VARIABLES, Cluster, read_cluster
from vlmpipe.trainer.distributed.launcher_guard import guarded
from vlmpipe.trainer.distributed.rendezvous import meet, rendezvous_timeout_s
from vlmpipe.trainer.errors import CAUSES, EXIT_FOLDER_VARIABLE, ConfigError, ExitCode, UserError, run_main
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.preflight.devices import require_gpu_each, visible_gpus
from vlmpipe.trainer.preflight.machine import require_machine
from vlmpipe.trainer.preflight.node import announce, check_node
from vlmpipe.trainer.preflight.reducers import require_reducers
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record

THREADS_VARIABLE = "OMP_NUM_THREADS"
# torchrun kills processes so long after it passed on SIGTERM; by itself after 30 s, as always before 2.12.
SHUTDOWN_VARIABLE, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 3600
KILLS_AFTER_S = 30  # torchrun, those that are left when a rank has failed
# Blocks of GPU memory that grow in place leave fewer holes: up to 30 % less was reserved for the same step.
ALLOCATOR_VARIABLES, GROWING_SEGMENTS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"


def main(arguments: list[str] | None = None) -> int:
    """Run the module named after `--` on this node, several processes under torchrun. Returns the job's exit code."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.launch", description=__doc__)
    parser.add_argument("--nproc-per-node", default="auto", help="processes on this node; auto is one per GPU, or one")
    parser.add_argument("module", help="module to run, followed by its arguments, after --")
    parser.add_argument("module_arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    os.environ[LAUNCHED_VARIABLE] = str(time.monotonic())
    cluster = read_cluster(os.environ) or one_node()
    reducers = f", {cluster.num_reducers} reducers (not counted)" if cluster.num_reducers else ""
    print(f"launcher: node {cluster.node_rank} of {cluster.num_nodes}, chief {cluster.hosts[0]}{reducers}", flush=True)
    run_uri = _run_uri(options.module_arguments)
    machine = require_machine(os.environ, run_uri=run_uri, node=cluster.node_rank)
    if run_json := _config_uri(options.module_arguments):
        folder, _, name = run_json.rpartition("/")
        use_secrets(read_record(open_storage(folder), name).get("secrets") or {})
    announce(check_node(run_uri, cluster.node_rank, machine))
    processes = processes_on_node(options.nproc_per_node)
    require_gpu_each(os.environ, processes * cluster.nodes_here)
    meet(cluster, timeout_s=rendezvous_timeout_s())
    if machine and machine.bought.reducers:
        fails = machine.bought.check == "fail"
        require_reducers(cluster.reducers, timeout_s=rendezvous_timeout_s(), fails=fails)
    for variable in NODE_LEVEL_VARIABLES:
        os.environ.pop(variable, None)
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))  # the sender of the signal enforces its own deadline
    if not any(os.environ.get(variable) for variable in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = GROWING_SEGMENTS
    with guarded(), _exit_folder() as exit_folder:
        if processes > 1:  # torchrun gives each one thread, too few for an optimizer step on the CPU (train.offload)
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            os.environ.setdefault(THREADS_VARIABLE, str(max(1, cores // processes)))
        if cluster.num_nodes == processes == 1:
            ended = _one_process([options.module, *options.module_arguments], cluster)
        else:
            ended = _torchrun(torchrun_arguments(cluster, processes, options.module, options.module_arguments))
        _print_order_of_ends(exit_folder, ended)
        return _exit_code(exit_folder, ended)


@contextlib.contextmanager
def _exit_folder() -> Iterator[Path]:
    """Where ranks leave their exit codes. Afterwards the environment is as before: a sweep's job launches several."""
    before = os.environ.get(EXIT_FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-exit-") as folder:
        os.environ[EXIT_FOLDER_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(EXIT_FOLDER_VARIABLE)
            if before is not None:
                os.environ[EXIT_FOLDER_VARIABLE] = before


def torchrun_arguments(cluster: Cluster, num_processes: int, module: str, arguments: list[str]) -> list[str]:
    """torchrun's arguments for one node."""
    return [
        "--nnodes", str(cluster.num_nodes),
        "--node-rank", str(cluster.node_rank),
        "--nproc-per-node", str(num_processes),
        "--master-addr", cluster.master_host,
        "--master-port", str(cluster.master_port),
        "--rdzv-conf", f"timeout={rendezvous_timeout_s()}",
        "--max-restarts", "0",
        "-m", module, *arguments,
    ]  # fmt: skip


def _run_uri(module_arguments: list[str]) -> str:
    """Folder of the run's run.json (--config); "" for a module without one."""
    return _config_uri(module_arguments).rpartition("/")[0]


def _config_uri(module_arguments: list[str]) -> str:
    """The run's run.json (--config); "" for a module without one."""
    if "--config" not in module_arguments[:-1]:
        return ""
    return module_arguments[module_arguments.index("--config") + 1]


def processes_on_node(text: str) -> int:
    """Return the number of processes for the value of --nproc-per-node. Raises ConfigError for an invalid one."""
    if text == "auto":
        return max(1, visible_gpus(os.environ))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node is {text!r}", expected="auto or a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class TorchrunEnd:
    """Exit code, 0 or 1, of torchrun or the only process, and the first (rank, signal) that was killed."""

    code: int
    killed: tuple[int, int] | None = None
    killed_s: float = 0.0  # Unix seconds


def _torchrun(arguments: list[str]) -> TorchrunEnd:
    """Run torchrun in this process. Its agent forwards SIGTERM and SIGINT to the workers, which then save and exit.

    Workers print their own errors, so the agent's stack traces are suppressed.
    """
    with collector_off():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        killed = [(rank, failure) for rank, failure in error.failures.items() if failure.exitcode < 0]
        for rank, failure in sorted(killed, key=lambda item: item[1].exitcode == -signal.SIGTERM):
            return TorchrunEnd(ExitCode.UNEXPECTED, (rank, -failure.exitcode), float(failure.timestamp))
        return TorchrunEnd(ExitCode.UNEXPECTED)
    except SignalException:
        return TorchrunEnd(ExitCode.UNEXPECTED)
    return TorchrunEnd(ExitCode.OK)


def _one_process(command: list[str], cluster: Cluster) -> TorchrunEnd:
    """Run a job's only process without torchrun, which takes seconds to import.

    It gets torchrun's variables, and SIGTERM and SIGINT. Unlike torchrun, it is not killed after 30 s: the sender of
    the signal has its own limit.
    """
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    place = {"MASTER_ADDR": cluster.master_host, "MASTER_PORT": cluster.master_port}
    environment = os.environ | {name: str(value) for name, value in {**ranks, **place}.items()}
    asked: list[int] = []  # signals before the process started
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    process = subprocess.Popen([sys.executable, "-u", "-m", *command], env=environment, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    for early in asked:
        process.send_signal(early)
    code = process.wait()
    killed = (0, -code) if code < 0 else None
    return TorchrunEnd(ExitCode.UNEXPECTED if code else ExitCode.OK, killed, time.time())


def _print_order_of_ends(exit_folder: Path, ended: TorchrunEnd) -> None:
    """Log the order in which ranks ended: all but the first often report only a lost connection."""
    ends = [
        (file.stat().st_mtime, file.name.removeprefix("rank-"), f"code {file.read_text(encoding='utf-8')}")
        for file in exit_folder.glob("rank-*")
    ]
    if all(how in ("code 0", f"code {ExitCode.PREEMPTED}") for _, _, how in ends) and not ended.killed:
        return
    if ended.killed:
        rank, number = ended.killed
        ends.append((ended.killed_s, str(rank), signal.Signals(number).name))
    order = [
        f"rank {rank} ({how}, {datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S.%f})"
        for at_s, rank, how in sorted(ends)
    ]
    print(f"launcher: ranks ended in this order: {', '.join(order)}", flush=True)


def _exit_code(exit_folder: Path, ended: TorchrunEnd) -> int:
    """The job's exit code from the workers' own, because torchrun always ends with 1.

    A named cause takes precedence over a kill, then an unexpected error, then "preempted": a killed rank leaves no
    code, and the others then lose their connection to it. Kills by torchrun do not count. Raises UserError for a kill,
    with a shell's code (128 + the signal's number).
    """
    codes = [int(file.read_text(encoding="utf-8")) for file in exit_folder.glob("rank-*")]
    named = [code for code in codes if code in CAUSES]
    if named:
        return max(named, key=named.count)
    if ended.killed and not _is_torchruns_own(ended, exit_folder):
        rank, number = ended.killed
        memory = "if that was for lack of memory, lower train.micro_batch_size; "
        raise UserError(
            f"the process of rank {rank} was ended by {signal.Signals(number).name}",
            fix=f"{memory if number == signal.SIGKILL else ''}start again: the run continues from what it has saved",
            code=128 + number,
        )
    if ExitCode.PREEMPTED in codes and ExitCode.UNEXPECTED not in codes:
        return ExitCode.PREEMPTED
    return ended.code


def _is_torchruns_own(ended: TorchrunEnd, exit_folder: Path) -> bool:
    """Return whether torchrun killed the rank because another had failed: by SIGTERM, and by SIGKILL where the rank is
    still there a while later. torchrun notes whole seconds, and so not which came first."""
    assert ended.killed
    failed_s = [file.stat().st_mtime for file in exit_folder.glob("rank-*") if file.read_text(encoding="utf-8") != "0"]
    if not failed_s:
        return False
    _, number = ended.killed
    return number == signal.SIGTERM or (number == signal.SIGKILL and ended.killed_s > min(failed_s) + KILLS_AFTER_S / 2)


def one_node() -> Cluster:
    """A job of this machine alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Cluster((f"127.0.0.1:{probe.getsockname()[1]}",), node_rank=0)


if __name__ == "__main__":
    sys.exit(run_main(main))
