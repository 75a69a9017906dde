"""The plan of a run, made before it began: `plan.json`.

The planner writes more than is read again (`vlmpipe.planner.plan.Plan.as_dict`). The file may be of another version of
the planner: a value that it lacks, or has in another form, is at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import (
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from vlmpipe.trainer.records.record import Part, Record
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import write_record


class Planned(Part):
    """Part of a plan."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _known_form(cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        try:
            return check(value)
        except ValidationError:
            if field.is_required():
                raise
            return field.get_default(call_default_factory=True)


class StepCost(Planned):
    """Machines of a job and what they cost."""

    job: str
    hours: float | None = None
    usd_per_hour: float | None = None
    usd: float | None = None


class TermCost(Planned):
    """The run on one kind of machines: standard, spot or flex_start, or an option of cluster.capacity_fallback."""

    possible: bool = False
    usd: float | None = None
    missing: tuple[str, ...] = ()
    steps: tuple[StepCost, ...] = ()


class PlannedCost(Planned):
    """Dollars of the whole run, on its own term and on others."""

    term: str = ""
    usd: float | None = None
    storage_usd_per_month: float | None = None
    by_term: dict[str, TermCost] = Field(default_factory=dict)
    elsewhere: dict[str, TermCost] = Field(default_factory=dict)  # in other regions
    steps: tuple[StepCost, ...] = ()
    assumptions: tuple[str, ...] = ()


class Interval(Planned):
    """Factors of the training's hours between which it is expected."""

    low: float | None = None
    high: float | None = None


class PlannedTime(Planned):
    """Steps and hours of training."""

    step_s: float | None = None
    pace: float = 1.0  # factor by which step_s was calibrated
    steps: int | None = None
    train_hours: float | None = None
    mfu: float | None = None
    binds: str | None = None
    interval: Interval | None = None
    assumptions: tuple[str, ...] = ()


class MemoryPart(Planned):
    """Something that lies in a device's memory."""

    name: str = ""
    bytes: int
    why: str = ""


class PlannedMemory(Planned):
    """The fullest device."""

    device: str = "device"
    capacity_bytes: float = 0.0
    parts: tuple[MemoryPart, ...] = ()


class PlannedJob(Planned):
    """A pool of machines."""

    accelerator_type: str = ""


class PlannedRun(Planned, Record):
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
