"""Record of the capacity options that a run has tried (`<run>/capacity_fallback.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from vlmpipe.trainer.records.record import of_another_version

FILE = "capacity_fallback.json"


@dataclass
class Attempt:
    """The attempt with one option."""

    strategy: str  # the option's name: a scheduling strategy, or reservation
    token: str  # label by which its job is found again
    job: str = ""  # resource name, once an answer came
    cancelled_for: str = ""  # wait, spend, time, stop, or end of its program, if we cancelled it
    outcome: str = ""  # no capacity, done, failed or stopped
    why: str = ""
    usd: float | None = None  # spent at most, at the plan's prices

    def line(self) -> str:
        """For people: `spot: no capacity, $0.00: no machines within 600 s, job PENDING`."""
        now = "being stopped" if self.cancelled_for else "under way"
        parts = [self.outcome or now, *([f"${self.usd:,.2f}"] if self.usd is not None else [])]
        return f"{self.strategy}: {', '.join(parts)}{f': {self.why}' if self.why else ''}"

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "token"}


_ATTEMPTS = TypeAdapter(tuple[Attempt, ...])


def parse_attempts(content: Mapping[str, object], of_run: str) -> tuple[Attempt, ...]:
    """The options in a capacity_fallback.json, in the order in which they were tried.

    A field that this version does not know is left out. Raises ConfigError for one of another type.

    Args:
        of_run: the version of `<run>/run.json`, which a resumed run writes again: it starts with the first option.
    """
    if content.get("of_run") != of_run:
        return ()
    try:
        return _ATTEMPTS.validate_python(content["attempts"])
    except ValidationError as error:
        raise of_another_version(FILE, error) from error


def waiting_message(options: Sequence[Attempt]) -> str:
    """Message of the training step until its first machine writes a record; "" without capacity fallback."""
    if not options or options[-1].outcome:
        return ""
    tried = [f"{option.strategy}: {option.outcome}" for option in options[:-1]]
    return "; ".join([*tried, f"{options[-1].strategy}: machines are being found or started"])
