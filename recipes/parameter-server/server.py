"""A parameter server: one shard of the parameters, its optimizer, and how the workers' updates come together.

The functions at the end are what workers call over torch RPC. Everything before them is free of RPC.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import rpc
from torch.futures import Future

Tensors = dict[str, torch.Tensor]
NOTHING_LEFT, ASK_AGAIN = -1, -2  # in place of the number of a micro-batch


@dataclass(frozen=True)
class Settings:
    """How training goes; the same on all servers and workers. A step is `workers` micro-batches."""

    workers: int
    steps: int
    staleness: int  # updates that a worker may be ahead of the slowest one; 0: synchronous, one update a step
    learning_rate: float
    schedule: str = "cosine"
    weight_decay: float = 0.01
    lost_after_s: float = 10.0  # asynchronous: silence after which others take over a worker's micro-batch

    @property
    def micro_batches(self) -> int:
        return self.steps * self.workers

    def learning_rate_at(self, step: int) -> float:
        warmup = max(1, self.steps // 10)
        falling = 0.5 + 0.5 * math.cos(math.pi * step / self.steps) if self.schedule == "cosine" else 1.0
        return self.learning_rate * min((step + 1) / warmup, falling)


class Answer(NamedTuple):
    """What a worker gets for its gradients."""

    done: int  # micro-batches that are in the parameters
    loss: float  # mean over the label tokens of the last update
    stop: bool  # the server was sent SIGTERM
    ended: int | None  # exit code, once training is over
    parameters: Tensors


class Shard:
    """Some of the parameters, and AdamW for them."""

    def __init__(self, settings: Settings, parameters: Tensors, moments: Mapping[str, Any] | None = None) -> None:
        self._settings = settings
        self._parameters = {name: torch.nn.Parameter(value) for name, value in parameters.items()}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), weight_decay=settings.weight_decay)
        for name, state in (moments or {}).items():
            self._optimizer.state[self._parameters[name]] = dict(state)

    def update(self, gradients: Sequence[Tensors], tokens: int, step: int) -> None:
        """One step of AdamW with the sum of the gradients of summed losses, over `tokens`."""
        for name, parameter in self._parameters.items():
            total = gradients[0][name]
            for one in gradients[1:]:
                total = total + one[name]
            parameter.grad = total.mul_(1 / tokens)
        self._optimizer.param_groups[0]["lr"] = self._settings.learning_rate_at(step)
        self._optimizer.step()

    def copy(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def moments(self) -> dict[str, Any]:
        return {
            name: {key: value.clone() for key, value in self._optimizer.state[parameter].items()}
            for name, parameter in self._parameters.items()
        }


class Server:
    """A shard, and the workers that wait for it. Methods may be called from any thread."""

    def __init__(self, settings: Settings, shard: Shard, done: int) -> None:
        self.settings, self.shard, self.done = settings, shard, done
        self.loss, self.stop = math.nan, False
        self.ended: int | None = None
        self._lock = threading.RLock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._copy = shard.copy()

    def answer(self) -> Answer:
        return Answer(self.done, self.loss, self.stop, self.ended, self._copy)

    def end(self, code: int) -> None:
        """Training is over, with this exit code; nobody waits any longer."""
        with self._lock:
            self.ended = code
            self._release(list(self._waiting))

    def progress(self) -> int:
        return self.done

    def max_ahead(self) -> int:
        """Updates that a worker has been ahead of the slowest one, at most."""
        return 0

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"done": self.done, "parameters": self._copy, "moments": self.shard.moments(), "left": self.left()}

    def left(self) -> list[int]:
        """The first micro-batches that have to be made yet, without gaps after the last."""
        return [self.done]

    def _release(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._waiting.pop(worker).set_result(self.answer())

    def _update(self, gradients: Sequence[Tensors], loss: float, tokens: int) -> None:
        self.shard.update(gradients, tokens, self.done // self.settings.workers)
        self.loss, self._copy = loss / tokens, self.shard.copy()
        self.done += len(gradients)


class Synchronous(Server):
    """One update a step, with the gradients of all workers: what DistributedDataParallel computes."""

    def __init__(self, settings: Settings, shard: Shard, done: int) -> None:
        super().__init__(settings, shard, done)
        self._before = self._copy  # the step's before the last update
        self._pushed: dict[int, tuple[Tensors, float, int]] = {}

    def join(self, worker: int) -> int:
        return self.done

    def seen(self, worker: int) -> None:
        """A worker that is lost is waited for."""

    def release_lost(self, now_s: float) -> None:
        """As `seen` says."""

    def pull(self, done: int) -> Tensors:
        """The parameters after `done` micro-batches: now, or a step ago, where other servers still are."""
        return self._copy if done == self.done else self._before

    def push(self, worker: int, number: int, gradients: Tensors, loss: float, tokens: int) -> Future[Answer]:
        """Of a worker that was restarted, gradients may come twice."""
        future: Future[Answer] = Future()
        with self._lock:
            if self.ended is not None or number < self.done:
                future.set_result(self.answer())
                return future
            self._pushed[worker], self._waiting[worker] = (gradients, loss, tokens), future
            if len(self._pushed) == self.settings.workers:
                self._before = self._copy
                pushed = [self._pushed[one] for one in sorted(self._pushed)]
                self._pushed.clear()
                self._update([one[0] for one in pushed], sum(one[1] for one in pushed), sum(one[2] for one in pushed))
                self._release(list(self._waiting))
        return future


class Asynchronous(Server):
    """An update for each micro-batch, by whichever worker is ready, within the bound on staleness.

    A worker's clock counts its updates. Who is `staleness` ahead of the slowest clock waits for its answer.
    """

    def __init__(self, settings: Settings, shard: Shard, done: int, left: Sequence[int] = ()) -> None:
        super().__init__(settings, shard, done)
        *self._returned, self._next = left or [done]
        self._taken: dict[int, int] = {}  # by worker
        self.clocks: dict[int, int] = {}
        self._most_ahead = 0
        self._seen_s: dict[int, float] = {}

    def left(self) -> list[int]:
        return [*self._returned, *self._taken.values(), self._next]

    def max_ahead(self) -> int:
        return self._most_ahead

    def join(self, worker: int) -> int:
        """Also after a restart: it begins as the slowest one."""
        with self._lock:
            self._forget(worker)
            self.clocks[worker] = min(self.clocks.values(), default=0)
            self.seen(worker)
            return self.done

    def seen(self, worker: int) -> None:
        self._seen_s[worker] = time.monotonic()

    def release_lost(self, now_s: float) -> None:
        """Wait no longer for workers that have been silent."""
        with self._lock:
            for worker in [one for one in self.clocks if now_s - self._seen_s[one] > self.settings.lost_after_s]:
                self._forget(worker)
            self._release_within_bound()

    def take(self, worker: int) -> int:
        """The number of the worker's next micro-batch."""
        with self._lock:
            if self.ended is not None or self.done >= self.settings.micro_batches:
                return NOTHING_LEFT
            if not self._returned and self._next >= self.settings.micro_batches:
                return ASK_AGAIN  # others compute the last ones, and may be lost
            if self._returned:
                self._taken[worker] = self._returned.pop(0)
            else:
                self._taken[worker], self._next = self._next, self._next + 1
            return self._taken[worker]

    def pull(self, done: int) -> Tensors:
        return self._copy

    def push(self, worker: int, number: int, gradients: Tensors, loss: float, tokens: int) -> Future[Answer]:
        """Gradients of a worker that was given up are dropped: their micro-batch is another's, and they may be old."""
        future: Future[Answer] = Future()
        with self._lock:
            if self.ended is not None or worker not in self.clocks:
                if worker not in self.clocks:
                    self.join(worker)
                future.set_result(self.answer())
                return future
            self._taken.pop(worker, None)
            self._update([gradients], loss, tokens)
            self.clocks[worker] += 1
            self._most_ahead = max(self._most_ahead, self.clocks[worker] - min(self.clocks.values()))
            self.seen(worker)
            self._waiting[worker] = future
            self._release_within_bound()
        return future

    def _release_within_bound(self) -> None:
        slowest = min(self.clocks.values(), default=0)
        self._release([one for one in self._waiting if self.clocks[one] - slowest < self.settings.staleness])

    def _forget(self, worker: int) -> None:
        self.clocks.pop(worker, None)
        if worker in self._taken:
            self._returned.append(self._taken.pop(worker))
        if worker in self._waiting:
            self._release([worker])


SERVER: Synchronous | Asynchronous | None = None  # this process's, once the chief has set it up
ASKED_TO_STOP: list[int] = []  # signals


def set_up(settings: Settings, parameters: Tensors, moments: dict[str, Any] | None, done: int, left: list[int]) -> None:
    global SERVER
    shard = Shard(settings, parameters, moments)
    SERVER = Asynchronous(settings, shard, done, left) if settings.staleness else Synchronous(settings, shard, done)


def is_up() -> bool:
    return SERVER is not None


def call(method: str, *arguments: Any) -> Any:
    """A method of this process's server."""
    return getattr(SERVER, method)(*arguments)


@rpc.functions.async_execution
def push(*arguments: Any) -> Future[Answer]:
    assert SERVER
    SERVER.stop = bool(ASKED_TO_STOP)
    return SERVER.push(*arguments)
