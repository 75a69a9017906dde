"""Settings that other programs spread over several keys, gathered by concept: batch, schedule, precision, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from vlmpipe.importing.findings import Path, path_text
from vlmpipe.importing.translation import Translation

OFF = (None, False, 0, "", "none", "no", "null", "false", "off", "never")


class Defaults(TypedDict, total=False):
    """Defaults of a training program by concept, where ours differ."""

    micro_batch: int
    accumulation: int
    epochs: int
    learning_rate: float
    preference_rate: float
    schedule: str
    warmup_steps: int
    warmup_ratio: float
    betas: list[float]
    precision: str
    length: int
    max_pixels: int
    checkpointing: bool
    method: str
    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    trains_tower: bool


@dataclass(frozen=True)
class Entry:
    """A value of the imported file."""

    path: Path
    value: object

    @property
    def name(self) -> str:
        return str(self.path[-1]) if self.path else ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


@dataclass
class Concepts:
    """Values of the file by concept. `defaults` are those of the program that the file is for, `program` its name."""

    translation: Translation
    program: str = ""
    defaults: Defaults = field(default_factory=Defaults)
    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, concept: str, path: Path, value: object) -> None:
        """Note a value; a second one of the same concept is refused."""
        if first := self.entries.get(concept):
            self.translation.refuse(path, f"{path_text(first.path)} says it too, and was taken")
            return
        self.entries[concept] = Entry(path, value)

    def take(self, concept: str) -> Entry | None:
        """The given value, if there is one that is set. It is noted as dropped until a field takes it."""
        entry = self.entries.get(concept)
        if entry is None or entry.value is None:
            return None
        return entry

    def number(self, concept: str) -> float | None:
        """A given number; None where it is not given. What is no number is refused."""
        entry = self.take(concept)
        if entry is None:
            return None
        value = number(entry.value)
        if value is None:
            reason = "transformers' Trainer fills in auto" if entry.value == "auto" else "it is no number"
            self.translation.drop(entry.path, reason) if entry.value == "auto" else self.translation.refuse(
                entry.path, reason
            )
        return value

    def count(self, concept: str) -> int | None:
        """A given whole number of at least 1."""
        value = self.number(concept)
        if value is None:
            return None
        if value < 1 or value != int(value):
            self.translation.refuse(self.entries[concept].path, "it is no whole number of at least 1")
            return None
        return int(value)

    def is_on(self, concept: str) -> bool:
        """Return whether a switch is given and on."""
        entry = self.take(concept)
        return entry is not None and is_on(entry.value)

    def by_default(self, what: str) -> str:
        return f"{what}: the default of {self.program}"


def is_on(value: object) -> bool:
    """Return whether a value switches something on, also as text."""
    value = value.strip().lower() if isinstance(value, str) else value
    return value not in OFF and value != []


def number(value: object) -> float | None:
    """A number, also one that is written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        result = float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return result if result is not None and abs(result) < 1e15 else None
