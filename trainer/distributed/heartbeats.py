"""Notices that a machine has vanished: its peers' sockets stay open, because nothing closes them.

gloo's connections have no keepalive, and ranks wait for each other for hours where a node's transfers differ, at the
start, in saves and at the end. So the first rank of each node writes a sign of life to the process group's TCPStore
every few seconds, with what the node does, and looks at those of the others. It ends its process when a node shows none
for as long as a collective may take; the launcher then ends the other ranks of its node.

A process that is there but does nothing is the watchdog's affair: its heart beats.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from vlmpipe.trainer.errors import ExitCode, UserError, leave, print_error
from vlmpipe.trainer.threads import start_thread

INTERVAL_S = 15.0
SILENT_S = 600.0  # as long as a collective may take
_doing = "starting"  # of this node, for the message of the others


class BeatStore(Protocol):
    """Functions of a torch.distributed.Store that heartbeats need."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


def now_doing(what: str) -> None:
    """Say what this node does, which the others name when it is lost."""
    global _doing
    _doing = what


class Heartbeats:
    """The signs of life of one node, and what it knows of the others'.

    `exchange` may block for ever once the machine is lost that holds the store, node 0. `judge` never does.
    """

    def __init__(
        self, node: int, num_nodes: int, *, silent_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._silent_s, self._clock = node, silent_s, clock
        self._others = [other for other in range(num_nodes) if other != node]
        self._beats = 0
        self._last: dict[int, bytes] = {}  # sign of each node
        self._silence_s = dict.fromkeys(self._others, 0.0)
        self._heard: set[int] = set()  # since the last judgement
        self._has_answered = False  # the store, since then
        self._judged_s = clock()
        self._lock = threading.Lock()

    def exchange(self, store: BeatStore) -> None:
        """Write a sign of life and read the others'."""
        self._beats += 1
        try:
            store.set(_key(self._node), f"{self._beats} {_doing}")
            signs = {other: store.get(_key(other)) for other in self._others if store.check([_key(other)])}
        except RuntimeError:  # torch.distributed.DistError: the store does not answer
            return
        with self._lock:
            self._has_answered = True
            self._heard |= {node for node, sign in signs.items() if sign != self._last.get(node)}
            self._last |= signs

    def judge(self) -> None:
        """Raise UserError (1) that names the nodes that have shown no sign of life for too long."""
        with self._lock:
            now_s = self._clock()
            # A process that was frozen as a whole, such as in a migrating machine, has not looked at others meanwhile.
            passed_s, self._judged_s = min(now_s - self._judged_s, 2 * INTERVAL_S), now_s
            for node in self._others:
                self._silence_s[node] = 0.0 if node in self._heard else self._silence_s[node] + passed_s
            # Of a store that does not answer nothing follows for others than the node that holds it.
            judged = [node for node in self._others if self._has_answered or node == 0]
            self._heard, self._has_answered = set(), False
            lost = [node for node in judged if self._silence_s[node] >= self._silent_s]
            did = [self._last.get(node, b"").decode().partition(" ")[2] for node in lost]
        if lost:
            named = ", ".join(f"node {node} ({what or 'never seen'})" for node, what in zip(lost, did, strict=True))
            raise UserError(
                f"no sign of life for {self._silent_s:,.0f} s from {named}",
                expected=f"one every {INTERVAL_S:,.0f} s from each node",
                fix="read that machine's log; start again: the run continues from its last checkpoint",
                code=ExitCode.UNEXPECTED,  # after which platforms restart a job
            )


def start_heart(node: int, num_nodes: int, *, end: Callable[[int], object] = leave) -> None:
    """Beat for as long as this process lives. On one rank of each node, once the process group is made."""
    limit = timedelta(seconds=2 * INTERVAL_S)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    hearts = Heartbeats(node, num_nodes, silent_s=SILENT_S)

    def exchange() -> None:
        while True:
            hearts.exchange(store)
            time.sleep(INTERVAL_S)

    def judge() -> None:
        while True:
            time.sleep(INTERVAL_S)
            try:
                hearts.judge()
            except UserError as error:
                print_error(error)
                end(int(error.code))

    for loop in (exchange, judge):
        start_thread(loop, name=f"heartbeats: {loop.__name__}")


def _key(node: int) -> str:
    return f"vlmpipe/alive/{node}"
