"""What the memory of a rank is put together from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FP32_BYTES, BF16_BYTES = 4, 2
Place = Literal["device", "machine", "disk"]


@dataclass(frozen=True)
class MemoryPart:
    """One part of the bar. `why` is a few words."""

    name: str
    bytes: int
    why: str = ""
    place: Place = "device"  # or where offloading puts it: the machine's memory, or a disk

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "bytes": self.bytes, "why": self.why}


def average_parts(count: int, *, averaged: bool) -> list[MemoryPart]:
    """The moving average of `count` weights (train.ema_decay), where there is one."""
    return [MemoryPart("averaged weights", FP32_BYTES * count, "fp32, train.ema_decay")] if averaged else []


def split(count: int, shards: int) -> int:
    """The largest of `shards` nearly equal shares."""
    return -(-count // shards)
