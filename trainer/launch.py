"""Starts one node of a distributed job: CLUSTER_SPEC in, torchrun out, one meaningful exit code back.

python -m trainer.launch --nproc-per-node auto -- trainer.train --config gs://bucket/runs/1/run.json
"""

from __future__ import annotations

import argparse
import glob
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster import NODE_LEVEL_VARIABLES, Cluster, read_cluster
from trainer.errors import CAUSES, EXIT_FOLDER_VARIABLE, ConfigError, ExitCode, UserError, run_main

RENDEZVOUS_TIMEOUT_S = 900  # Vertex starts each replica when its machine is ready, minutes apart
RESOLVE_POLL_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run the module named after `--` on this node, under torchrun. Returns the job's exit code."""
    parser = argparse.ArgumentParser(prog="trainer.launch", description=__doc__)
    parser.add_argument("--nproc-per-node", default="auto", help="processes on this node; auto is one per GPU, or one")
    parser.add_argument("module", help="module to run, followed by its arguments, after --")
    parser.add_argument("module_arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    cluster = read_cluster(os.environ) or Cluster((f"127.0.0.1:{_free_port()}",), node_rank=0)
    _describe(cluster)
    if cluster.node_rank > 0:
        _wait_until_resolvable(cluster.master_host)
    for variable in NODE_LEVEL_VARIABLES:
        os.environ.pop(variable, None)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-exit-") as exit_folder:
        os.environ[EXIT_FOLDER_VARIABLE] = exit_folder
        processes = _processes(options.nproc_per_node)
        ended = _torchrun(torchrun_arguments(cluster, processes, options.module, options.module_arguments))
        return _exit_code(Path(exit_folder), ended)


def torchrun_arguments(cluster: Cluster, num_processes: int, module: str, arguments: list[str]) -> list[str]:
    """torchrun's arguments for one node. Its `node-rank` and `nnodes` count nodes; process ranks follow from them."""
    return [
        "--nnodes", str(cluster.num_nodes),
        "--node-rank", str(cluster.node_rank),
        "--nproc-per-node", str(num_processes),
        "--master-addr", cluster.master_host,
        "--master-port", str(cluster.master_port),
        "--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}",
        "--max-restarts", "0",
        "-m", module, *arguments,
    ]  # fmt: skip


def _processes(text: str) -> int:
    if text == "auto":
        return max(1, len(glob.glob("/dev/nvidia[0-9]*")))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node is {text!r}", expected="auto or a whole number of at least 1")
    return int(text)


def _describe(cluster: Cluster) -> None:
    reducers = f", {cluster.num_reducers} reducers (not counted)" if cluster.num_reducers else ""
    print(
        f"launcher: node {cluster.node_rank} of {cluster.num_nodes}, chief {cluster.hosts[0]}{reducers}",
        flush=True,
    )


def _wait_until_resolvable(host: str) -> None:
    """The chief's name may enter DNS minutes after this replica starts."""
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the chief's host name {host} did not resolve within {RENDEZVOUS_TIMEOUT_S} s: {error}",
                    fix="look at the chief's log: its replica may not have started",
                    code=ExitCode.UNAVAILABLE,
                ) from error
            time.sleep(RESOLVE_POLL_S)


@dataclass(frozen=True)
class TorchrunEnd:
    """How torchrun ended: 0 or 1, and the first worker that a signal ended, as (rank, signal)."""

    code: int
    killed: tuple[int, int] | None = None


def _torchrun(arguments: list[str]) -> TorchrunEnd:
    """Run torchrun in this process. Its agent passes SIGTERM and SIGINT on to the workers, which can then save and
    leave.

    Workers have said themselves what went wrong, so the agent's own stack traces are left out of the log.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        killed = [(rank, -failure.exitcode) for rank, failure in error.failures.items() if failure.exitcode < 0]
        return TorchrunEnd(ExitCode.UNEXPECTED, killed[0] if killed else None)
    except SignalException:
        return TorchrunEnd(ExitCode.UNEXPECTED)
    return TorchrunEnd(ExitCode.OK)


def _exit_code(exit_folder: Path, ended: TorchrunEnd) -> int:
    """The job's exit code from what each worker left, because torchrun itself ends with 1 whatever happened.

    A named cause beats a kill, which beats an unexpected error, which beats "preempted": a rank that is killed leaves
    nothing, and the others then lose their connection to it. Raises UserError for a kill, with the code that a shell
    gives it (128 + the signal's number).
    """
    codes = [int(file.read_text()) for file in exit_folder.glob("rank-*")]
    named = [code for code in codes if code in CAUSES]
    if named:
        return max(named, key=named.count)
    if ended.killed:
        raise _killed(*ended.killed)
    if ExitCode.PREEMPTED in codes and ExitCode.UNEXPECTED not in codes:
        return ExitCode.PREEMPTED
    return ended.code


def _killed(rank: int, number: int) -> UserError:
    memory = "if that was for lack of memory, lower train.micro_batch_rows or data.row_tokens; "
    return UserError(
        f"the process of rank {rank} was ended by {signal.Signals(number).name}",
        fix=f"{memory if number == signal.SIGKILL else ''}start again: the run continues from what it has saved",
        code=128 + number,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(run_main(main))
