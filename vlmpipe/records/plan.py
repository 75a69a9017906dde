"""The plan of a run, made before it began: `plan.json`.

The planner writes more than is read again (`vlmpipe.planner.plan.Plan.as_dict`). A value that another version of it did
not write is at its default; one in another form is refused by its name, as in every record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, JsonValue

from vlmpipe.trainer.records.record import Part, Record
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import write_record


class StepCost(Part):
    """Machines of a job and what they cost."""

    job: str
    hours: float | None = None
    usd_per_hour: float | None = None
    usd: float | None = None


class TermCost(Part):
    """The run on one kind of machines: standard, spot or flex_start, or an option of cluster.capacity_fallback."""

    possible: bool = False
    usd: float | None = None
    missing: tuple[str, ...] = ()
    steps: tuple[StepCost, ...] = ()


class PlannedCost(Part):
    """Dollars of the whole run, on its own term and on others."""

    term: str = ""
    usd: float | None = None
    storage_usd_per_month: float | None = None
    by_term: dict[str, TermCost] = Field(default_factory=dict)
    elsewhere: dict[str, TermCost] = Field(default_factory=dict)  # in other regions
    steps: tuple[StepCost, ...] = ()
    assumptions: tuple[str, ...] = ()


class Interval(Part):
    """Factors of the training's hours between which it is expected."""

    low: float | None = None
    high: float | None = None


class PlannedTime(Part):
    """Steps and hours of training."""

    step_s: float | None = None
    pace: float = 1.0  # factor by which step_s was calibrated
    steps: int | None = None
    train_hours: float | None = None
    mfu: float | None = None
    binds: str | None = None
    interval: Interval | None = None
    assumptions: tuple[str, ...] = ()


class MemoryPart(Part):
    """Something that lies in a device's memory."""

    name: str = ""
    bytes: int
    why: str = ""


class PlannedMemory(Part):
    """The fullest device."""

    device: str = "device"
    capacity_bytes: float = 0.0
    parts: tuple[MemoryPart, ...] = ()


class PlannedJob(Part):
    """A pool of machines."""

    accelerator_type: str = ""


class PlannedRun(Record):
    """The parts of a plan that a report, a status or a later plan compares with."""

    FILE: ClassVar[str] = "plan.json"
    STEP: ClassVar[str] = "resolve-run"

    name: str = ""
    state: str = "unknown"
    findings: tuple[dict[str, JsonValue], ...] = ()
    jobs: dict[str, tuple[PlannedJob, ...]] = Field(default_factory=dict)
    memory: PlannedMemory | None = None
    time: PlannedTime | None = None
    cost: PlannedCost | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def write_plan(cls, store: Storage, plan: Mapping[str, object]) -> None:
        """Write all of the planner's content."""
        write_record(store, cls.FILE, plan, indent=1)
