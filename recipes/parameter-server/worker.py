"""Processes of training with parameter servers, joined by torch RPC: what a server and what a worker does.

The group is dynamic: a worker that was restarted joins under the rank and name that it had. Whoever loses a peer that
it needs ends with 75, to be restarted.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import server
import torch
from server import Answer, Settings, Tensors
from torch.distributed import PrefixStore, TCPStore, rpc

STOPPED = 75  # exit code of what may be started again
FOR_PEERS_S = 900.0  # machines start minutes apart
ALIVE_S, SILENT_S = 1.0, 60.0  # between two signs of life; silence after which the chief is given up
LAST_UPDATES_S = 10.0  # one whose worker was killed between two servers never comes
CHIEF = "worker0"


class ServerLostError(Exception):
    """A server has ended, and its shard with it."""


def name_of(rank: int, workers: int) -> str:
    """Without dashes: those who join a dynamic group cut names at them, and wait for ever."""
    return f"worker{rank}" if rank < workers else f"server{rank - workers}"


def join_group(rank: int, workers: int) -> None:
    """Become a member of the RPC group at MASTER_ADDR and MASTER_PORT, which rank 0 opens."""
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank and members().check([name_of(rank, workers)]):
        forget_member(name_of(rank, workers), rank)
    options = rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=FOR_PEERS_S)
    rpc.init_rpc(name_of(rank, workers), rank=rank, rpc_backend_options=options)
    members().set(name_of(rank, workers), "joined")


@functools.cache
def members() -> TCPStore:
    """Rank 0's store, in which members say that they have joined."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=FOR_PEERS_S))


def forget_member(name: str, rank: int) -> None:
    """Take out the member that this process replaces: it was killed, and RPC's own records of torch 2.13 keep it."""
    records = PrefixStore("rpc_prefix_0", members())
    everyone = records.get("names/_ALL_WORKER_INFOS").decode()
    records.set("names/_ALL_WORKER_INFOS", everyone.replace(f"{name}-{rank},", ""))
    for key in (f"names/{rank}", f"addrs/{name}", f"Token_for_{name}_join"):
        records.delete_key(key)


def leave(code: int) -> None:
    """End at once: RPC has no goodbye for groups whose members may be lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> int:
    """Answer workers until training is over, or the chief is lost. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _: server.ASKED_TO_STOP.append(number))
    members().wait([CHIEF])
    alive = rpc.rpc_async(CHIEF, server.is_up, timeout=SILENT_S)
    while server.SERVER is None or server.SERVER.ended is None:  # noticed even while the chief's answer is awaited
        time.sleep(ALIVE_S)
        if alive.done():
            try:
                alive.wait()
            except RuntimeError as error:
                if server.SERVER and server.SERVER.ended is not None:
                    break
                print(f"server: the chief is lost: {error}", flush=True)
                return STOPPED
            alive = rpc.rpc_async(CHIEF, server.is_up, timeout=SILENT_S)
        if server.SERVER:
            server.SERVER.release_lost(time.monotonic())
    time.sleep(2 * ALIVE_S)  # the last answers are on their way
    return server.SERVER.ended


def split(parameters: Mapping[str, torch.Tensor], servers: int) -> list[list[str]]:
    """Names by server: the largest parameter first, each to the server that has least. Whole parameters only."""
    shards: list[list[str]] = [[] for _ in range(servers)]
    held = [0] * servers
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        least = held.index(min(held))
        shards[least].append(name)
        held[least] += parameters[name].numel()
    return shards


class Servers:
    """All servers as one, for one worker's model."""

    def __init__(self, model: torch.nn.Module, worker: int, servers: int, settings: Settings) -> None:
        self._worker, self._settings = worker, settings
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._names = [f"server{index}" for index in range(servers)]
        self._shards = split(self._parameters, servers)

    def wait(self) -> None:
        members().wait(self._names)

    def set_up(self, moments: Mapping[str, Any], done: int, left: list[int]) -> None:
        """Give each server its shard of the model and of the optimizer's state. The chief does it."""
        for name, shard in zip(self._names, self._shards, strict=True):
            parameters = {one: self._parameters[one].detach() for one in shard}
            mine = {one: moments[one] for one in shard} if moments else None
            rpc.rpc_sync(name, server.set_up, args=(self._settings, parameters, mine, done, left), timeout=0)

    def join(self) -> int:
        """Take part, with the servers' parameters in the model. Returns the micro-batches that are done."""
        for name in self._names:
            while not rpc.rpc_sync(name, server.is_up):
                time.sleep(0.2)
        done = min(self._all("join", self._worker))
        for parameters in self._all("pull", done):
            self._load(parameters)
        threading.Thread(target=self._keep_alive, daemon=True).start()
        return done

    def numbers(self, done: int) -> Iterator[int]:
        """Numbers of this worker's micro-batches."""
        if not self._settings.staleness:
            yield from range(done + self._worker, self._settings.micro_batches, self._settings.workers)
            return
        while (number := self._call(self._names[0], "take", self._worker)) != server.NOTHING_LEFT:
            if number == server.ASK_AGAIN:
                time.sleep(0.1)
            else:
                yield number

    def push(self, number: int, loss: float, tokens: int) -> Answer:
        """Send the model's gradients, and take the parameters that they lead to."""
        futures = []
        for name, shard in zip(self._names, self._shards, strict=True):
            gradients = {one: self._gradient(one) for one in shard}
            arguments = (self._worker, number, gradients, loss, tokens)
            futures.append(rpc.rpc_async(name, server.push, args=arguments, timeout=0))
        answers = _wait(futures)
        for answer in answers:
            self._load(answer.parameters)
        return answers[0]._replace(
            stop=any(one.stop for one in answers),
            ended=next((one.ended for one in answers if one.ended is not None), None),
        )

    def state(self) -> tuple[dict[str, Any], int, list[int]]:
        """The optimizer's state by parameter, how many micro-batches are done, and which are left.

        Loads the servers' parameters.
        """
        states = self._all("state")
        for state in states:
            self._load(state["parameters"])
        done = min(state["done"] for state in states)
        return {name: one for state in states for name, one in state["moments"].items()}, done, states[0]["left"]

    def max_ahead(self) -> int:
        return max(self._all("max_ahead"))

    def finish(self) -> None:
        """Once nothing is left: wait for the last updates of other workers, and take their parameters."""
        deadline_s = time.monotonic() + LAST_UPDATES_S
        while min(self._all("progress")) < self._settings.micro_batches and time.monotonic() < deadline_s:
            time.sleep(0.1)
        self.state()
        self.end(0)

    def end(self, code: int) -> None:
        """Let servers and other workers end with this code."""
        self._all("end", code)

    def _gradient(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _load(self, parameters: Tensors) -> None:
        for name, value in parameters.items():
            self._parameters[name].data.copy_(value)

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        return _wait([rpc.rpc_async(name, server.call, args=(method, *arguments), timeout=0)])[0]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        futures = [rpc.rpc_async(name, server.call, args=(method, *arguments), timeout=0) for name in self._names]
        return _wait(futures)

    def _keep_alive(self) -> None:
        try:
            while True:
                self._all("seen", self._worker)
                time.sleep(ALIVE_S)
        except ServerLostError:
            pass  # the worker's own next call says so


def _wait(futures: list[Any]) -> list[Any]:
    try:
        return [future.wait() for future in futures]
    except RuntimeError as error:
        raise ServerLostError(error) from error


def work(
    model: torch.nn.Module,
    servers: Servers,
    gradients: Callable[[int], tuple[float, int]],
    answered: Callable[[Answer], int | None] = lambda answer: None,
) -> int:
    """Train until nothing is left. Returns the exit code.

    Args:
        gradients: leaves the gradients of a micro-batch's summed loss in the model; returns the loss and its tokens.
        answered: called after each update; an exit code ends training.
    """
    try:
        for number in servers.numbers(servers.join()):
            loss, tokens = gradients(number)
            answer = servers.push(number, loss, tokens)
            model.zero_grad()
            code = answer.ended if answer.ended is not None else answered(answer)
            if code is not None:
                return code
    except ServerLostError as error:
        print(f"worker: a server is lost: {error}", flush=True)
        return STOPPED
    return 0
