"""Parses the faults of `vlmpipe run --inject-fault` into events; fault_injector.py carries them out.

    preempt:node=1,after_step=20,notice=5s     SIGTERM to the replica, SIGKILL after the notice, like a Spot machine
    kill:rank=0,after_step=7                   SIGKILL to one training process
    kill:node=1,after_step=3                   SIGKILL to all processes of a replica
    stop:node=1,after_step=3,for=2s            SIGSTOP, later SIGCONT: a straggler
    random:seed=7,every_steps=15,count=4       `count` random events, one in each `every_steps` steps

All but random also take delay=0.4s, the time after the step; after_step=0 is the job's start. The same text gives the
same events for the same number of nodes and ranks, on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vlmpipe.trainer.errors import ConfigError

LONGEST_NOTICE_S = 30.0  # Compute Engine, Spot VMs: best effort, up to 30 seconds
DEFAULT_NOTICE_S = 30.0
LONGEST_S = 3600.0
EXAMPLES = {
    "preempt": "preempt:node=1,after_step=20,notice=5s",
    "kill": "kill:rank=0,after_step=7 or kill:node=1,after_step=3",
    "stop": "stop:node=1,after_step=3,for=2s",
    "random": "random:seed=7,every_steps=15,count=4",
}
_SECONDS = re.compile(r"^(\d+(?:\.\d+)?)s$")
_Value = int | float


@dataclass(frozen=True)
class Event:
    """One fault. It is due `delay_s` after training has recorded `after_step` steps."""

    kind: str  # preempt | kill | stop
    after_step: int
    node: int | None = None
    rank: int | None = None
    notice_s: float = DEFAULT_NOTICE_S
    for_s: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        """The event as it is written on the command line."""
        where = f"rank={self.rank}" if self.node is None else f"node={self.node}"
        text = f"{self.kind}:{where},after_step={self.after_step}"
        text += f",notice={self.notice_s:g}s" if self.kind == "preempt" else ""
        text += f",for={self.for_s:g}s" if self.kind == "stop" else ""
        return text + (f",delay={self.delay_s:g}s" if self.delay_s else "")


def parse_faults(texts: Sequence[str], *, nodes: int, ranks_per_node: int) -> list[Event]:
    """The events of these texts, each of which may hold several, separated by `;`, in the order of their steps.

    Raises ConfigError, also for a node or rank that the job does not have.
    """
    events: list[Event] = []
    for text in (part.strip() for option in texts for part in option.split(";")):
        if not text:
            raise ConfigError("an event of --inject-fault is empty", expected=_all_examples())
        events += _parse(text, nodes, ranks_per_node)
    return sorted(events, key=lambda event: (event.after_step, event.delay_s))


def _parse(text: str, nodes: int, ranks_per_node: int) -> list[Event]:
    kind, _, rest = text.partition(":")
    if kind not in EXAMPLES:
        raise ConfigError(f"--inject-fault {text!r}: {kind!r} is no kind of event", expected=_all_examples())
    fields = _fields(text, kind, rest)
    if kind == "random":
        return random_events(
            seed=int(fields["seed"]),
            every_steps=int(fields["every_steps"]),
            count=int(fields["count"]),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
        )
    event = Event(kind, **fields)  # type: ignore[arg-type]
    for what, number, count in (("node", event.node, nodes), ("rank", event.rank, nodes * ranks_per_node)):
        if number is not None and number >= count:
            raise ConfigError(
                f"--inject-fault {text!r}: training has no {what} {number}", expected=f"{what}=0 to {count - 1}"
            )
    return [event]


def random_events(*, seed: int, every_steps: int, count: int, nodes: int, ranks_per_node: int) -> list[Event]:
    """`count` events, one at a random step of each `every_steps` steps. Half are kills, which give no notice at all."""
    draw = random.Random(seed).random  # of all its methods, only this one never changes between versions of Python
    events = []
    for number in range(count):
        node, rank = int(draw() * nodes), int(draw() * nodes * ranks_per_node)
        event = (
            Event("kill", 0, rank=rank),
            Event("kill", 0, rank=0),
            Event("kill", 0, node=node),
            Event("preempt", 0, node=node, notice_s=(0.0, 5.0, 30.0)[int(draw() * 3)]),
            Event("preempt", 0, node=node, notice_s=DEFAULT_NOTICE_S),
            Event("stop", 0, node=node, for_s=round(0.5 + 2 * draw(), 1)),
        )[int(draw() * 6)]
        step = number * every_steps + 1 + int(draw() * every_steps)
        events.append(replace(event, after_step=step, delay_s=round(draw(), 2)))
    return events


def _fields(text: str, kind: str, rest: str) -> dict[str, _Value]:
    """The event's fields by the names of Event's, checked: none unknown, none twice, none missing."""
    known, required = _KINDS[kind]
    fields: dict[str, _Value] = {}
    for pair in rest.split(",") if rest else []:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in known:
            raise ConfigError(
                f"--inject-fault {text!r}: {pair.strip()!r} is nothing that {kind} takes",
                expected=f"{', '.join(f'{field}=...' for field in known)}, for example {EXAMPLES[kind]}",
            )
        target, read = known[name]
        if target in fields:
            raise ConfigError(f"--inject-fault {text!r}: {name} is given twice", expected=EXAMPLES[kind])
        fields[target] = read(text, name, value)
    for alternatives in required:
        alternatives_given = [name for name in alternatives if known[name][0] in fields]
        if len(alternatives_given) != 1:
            problem = (
                f"{' and '.join(alternatives_given)} are given"
                if alternatives_given
                else f"{' or '.join(alternatives)} is missing"
            )
            raise ConfigError(f"--inject-fault {text!r}: {problem}", expected=EXAMPLES[kind])
    return fields


def _whole(minimum: int) -> Callable[[str, str, str], _Value]:
    def read(text: str, name: str, value: str) -> _Value:
        if not (value.isascii() and value.isdigit()) or int(value) < minimum:
            raise ConfigError(
                f"--inject-fault {text!r}: {name} is {value!r}", expected=f"a whole number of at least {minimum}"
            )
        return int(value)

    return read


def _seconds(max_s: float) -> Callable[[str, str, str], _Value]:
    def read(text: str, name: str, value: str) -> _Value:
        match = _SECONDS.match(value)
        if match is None or float(match[1]) > max_s:
            raise ConfigError(f"--inject-fault {text!r}: {name} is {value!r}", expected=f"seconds, 0s to {max_s:g}s")
        return float(match[1])

    return read


_Known = dict[str, tuple[str, Callable[[str, str, str], _Value]]]
_WHEN: _Known = {"after_step": ("after_step", _whole(0)), "delay": ("delay_s", _seconds(LONGEST_S))}
_NODE: _Known = {"node": ("node", _whole(0))}
_KINDS: dict[str, tuple[_Known, list[list[str]]]] = {
    "preempt": (
        _NODE | _WHEN | {"notice": ("notice_s", _seconds(LONGEST_NOTICE_S))},
        [["node"], ["after_step"]],
    ),
    "kill": (_NODE | {"rank": ("rank", _whole(0))} | _WHEN, [["rank", "node"], ["after_step"]]),
    "stop": (_NODE | _WHEN | {"for": ("for_s", _seconds(LONGEST_S))}, [["node"], ["after_step"], ["for"]]),
    "random": (
        {name: (name, _whole(least)) for name, least in (("seed", 0), ("every_steps", 1), ("count", 1))},
        [["seed"], ["every_steps"], ["count"]],
    ),
}


def _all_examples() -> str:
    return "one of\n" + "\n".join(EXAMPLES.values())
