"""The program's process on one node: its command line, its environment, and how it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.distributed.cluster_env import NODE_LEVEL_VARIABLES, Cluster, Roles
from vlmpipe.trainer.distributed.rendezvous import rendezvous_timeout_s
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.external.process_tree import Running, adopt_orphans, below, kill_all, to_ask
from vlmpipe.trainer.threads import start_timer

ROLE_VARIABLE = "VLMPIPE_ROLE"  # chief, worker, ps or evaluator
POLL_S = 0.2  # between two looks at what is left of a program that was asked to stop
KILL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Node:
    """Where the program runs."""

    cluster: Cluster
    processes: int
    roles: Roles | None = None  # of launches that know more than nodes

    @property
    def trains(self) -> bool:
        """Return whether this replica is the chief or a worker."""
        return self.roles is None or self.roles.is_node

    @property
    def meets(self) -> bool:
        """Return whether this replica waits for the other nodes, and resumes from the chief's choice.

        Not where servers hold the state: their workers may be restarted one by one, while the chief continues.
        """
        return self.trains and not (self.roles and self.roles.hosts["ps"])

    @property
    def is_chief(self) -> bool:
        return self.trains and self.cluster.node_rank == 0

    @property
    def name(self) -> str:
        if self.roles and not self.trains:
            return f"{self.roles.role} {self.roles.index}"
        return f"node {self.cluster.node_rank} of {self.cluster.num_nodes}"

    @property
    def world_size(self) -> int:
        return self.cluster.num_nodes * self.processes


def command_line(trainer: ExternalTrainerConfig, words: Sequence[str], node: Node) -> list[str]:
    """Commands started on this node, with `words` as the filled-in command."""
    python = trainer.python or sys.executable
    command = [python, "-m", trainer.python_module, *words] if trainer.kind == "package" else list(words)
    if trainer.launch == "torchrun" and node.world_size > 1:
        cluster = node.cluster
        return [
            python, "-m", "torch.distributed.run",
            "--nnodes", str(cluster.num_nodes),
            "--node-rank", str(cluster.node_rank),
            "--nproc-per-node", str(node.processes),
            "--master-addr", cluster.master_host,
            "--master-port", str(cluster.master_port),
            "--rdzv-conf", f"timeout={rendezvous_timeout_s()}",
            "--max-restarts", "0",
            "--no-python", *command,
        ]  # fmt: skip
    if trainer.launch == "horovod":
        return ["horovodrun", "-np", str(node.processes), *command]
    return command


def environment(trainer: ExternalTrainerConfig, node: Node, variables: Mapping[str, str]) -> dict[str, str]:
    """The program's variables: the platform's, those of its launch, and `variables`."""
    inherited = dict(os.environ)
    inherited.pop("PYTHONSAFEPATH", None)  # a script finds the modules beside it, as it does in an image
    if trainer.python:  # an environment of its own, which must not see this one's modules
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            inherited.pop(name, None)
    bin_folder = os.path.dirname(os.path.abspath(trainer.python or sys.executable))
    inherited["PATH"] = os.pathsep.join([bin_folder, inherited.get("PATH", os.defpath)])
    cluster = node.cluster
    place = {"MASTER_ADDR": cluster.master_host, "MASTER_PORT": str(cluster.master_port)}
    if trainer.launch != "each-node":
        for name in NODE_LEVEL_VARIABLES:
            inherited.pop(name, None)
    if trainer.launch == "self":
        counts = {"NNODES": cluster.num_nodes, "NODE_RANK": cluster.node_rank, "NPROC_PER_NODE": node.processes}
        inherited |= {name: str(value) for name, value in counts.items()} | place
    elif trainer.launch == "torchrun" and node.world_size == 1:
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
        inherited |= {name: str(value) for name, value in ranks.items()} | place
    elif trainer.launch == "tensorflow" and node.roles:
        inherited["TF_CONFIG"] = node.roles.tf_config()
    elif trainer.launch == "roles" and node.roles:
        ranks = {"RANK": node.roles.rank, "WORLD_SIZE": node.roles.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        inherited |= {name: str(value) for name, value in ranks.items()} | place | {ROLE_VARIABLE: node.roles.role}
    if node.processes > 1:  # torchrun would give each one thread
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        inherited.setdefault("OMP_NUM_THREADS", str(max(1, cores // node.processes)))
    return {**inherited, **variables}


class TrainerProcess:
    """The running program. SIGTERM and SIGINT are passed on to it; what is left of it is killed after the grace.

    It is in a session of its own, and this process inherits the orphans of all that it starts: so children that it
    leaves behind are found, those of torchrun too, which have sessions of their own. After a `with` block it has ended,
    whatever ended the block.

    Args:
        lock: a descriptor that it inherits, and holds for as long as it lives.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], *, grace_s: float, lock: int) -> None:
        self._grace_s = grace_s
        self.stopping = False  # no Event: a second signal inside its set() would wait for the first
        self._timer: threading.Timer | None = None
        adopt_orphans()
        self._others = frozenset(process.pid for process in below(os.getpid()))
        asked: list[int] = []  # signals before it started
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: asked.append(number))
        try:
            self._process = subprocess.Popen(command, env=dict(variables), start_new_session=True, pass_fds=(lock,))
        except OSError as error:
            raise ConfigError(
                f"train.trainer.command: {command[0]} cannot be started: {error.strerror}",
                expected="a program of the image, on this machine one in the folder of train.trainer.python or on PATH",
            ) from error
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.ask_to_stop())
        if asked:
            self.ask_to_stop()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.wait(0) is None:
            print("launcher: the program is asked to stop, as this launcher ends", flush=True)
            self.ask_to_stop()
            end = time.monotonic() + self._grace_s + KILL_LIMIT_S
            while self.wait(POLL_S) is None and time.monotonic() < end:
                pass
        self.clean_up()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code once it has ended, None after `timeout_s`; 128 + number for a signal.

        Of one that was asked to stop: once all that it has started has ended too, as what ends at a stop may leave
        others that still save.
        """
        end = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        while self.stopping and self._running():
            if (left_s := end - time.monotonic()) <= 0:
                return None
            time.sleep(min(left_s, POLL_S))
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once, to the program and where it does not pass it on to those below it; SIGKILL after the
        grace."""
        if self.stopping:
            return
        self.stopping = True
        for pid in to_ask(os.getpid(), self._running()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._timer = start_timer(self._grace_s, self._end_grace)

    def clean_up(self) -> bool:
        """After its end: kill what it has left behind. Returns whether there was anything."""
        if self._timer:
            self._timer.cancel()
        return self._kill() > 0

    def _end_grace(self) -> None:
        if killed := self._kill():
            print(
                f"launcher: {killed} processes still ran {self._grace_s:g} s after SIGTERM, and were killed", flush=True
            )

    def _kill(self) -> int:
        """Kill the program and all that it has started. Returns how many processes that were."""
        killed: set[int] = set()
        end = time.monotonic() + KILL_LIMIT_S  # one that the kernel holds ends later
        while (left := self._running()) and time.monotonic() < end:
            kill_all(left)
            killed |= {process.pid for process in left}
            time.sleep(0.01)
        return len(killed)

    def _running(self) -> list[Running]:
        return below(os.getpid(), without=self._others)
