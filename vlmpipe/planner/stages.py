"""The plan of a whole run: one of each stage, and their sums."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.stages import naming_stage
from vlmpipe.planner.cost.bill import Bill, bill_of_stages
from vlmpipe.planner.cost.cron import runs_per_month
from vlmpipe.planner.plan import STATES, Plan, State, plan_run
from vlmpipe.planner.steps.estimate import WHOLE, Stage


@dataclass(frozen=True)
class StagesPlan:
    """Plans of the stages of a run, which follow each other. None: not known for some stage."""

    name: str
    stages: dict[str, Plan]
    starts: dict[str, str]  # where each stage's model comes from
    data: dict[str, str]  # each stage's sources
    schedule_runs_per_month: float | None = None

    @property
    def state(self) -> State:
        """The worst stage's state."""
        return max((plan.state for plan in self.stages.values()), key=STATES.index)

    @property
    def errors(self) -> list[str]:
        """Why the run would fail, a line each."""
        return [f"stage {name}: {error}" for name, plan in self.stages.items() for error in plan.errors]

    @property
    def doubts(self) -> list[str]:
        """Why a plan without errors is amber, a phrase each."""
        return [f"stage {name}: {doubt}" for name, plan in self.stages.items() for doubt in plan.doubts]

    @property
    def train_hours(self) -> float | None:
        """Hours of training in all stages."""
        return self._sum(lambda plan: plan.time.train_hours if plan.time else None)

    @property
    def usd(self) -> float | None:
        """Cost of all jobs of all stages."""
        return self._sum(lambda plan: plan.cost.usd if plan.cost else None)

    @property
    def bill(self) -> Bill | None:
        """The bill of all stages; None where a stage has none."""
        bills = [plan.bill for plan in self.stages.values() if plan.bill]
        return bill_of_stages(bills) if len(bills) == len(self.stages) else None

    def _range(self, of_stage: Callable[[Plan], tuple[float, float] | None]) -> tuple[float, float] | None:
        ranges = [of_stage(plan) for plan in self.stages.values()]
        known = [value for value in ranges if value is not None]
        return (sum(low for low, _ in known), sum(high for _, high in known)) if len(known) == len(ranges) else None

    def _sum(self, of_stage: Callable[[Plan], float | None]) -> float | None:
        values = [of_stage(plan) for plan in self.stages.values()]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        runs, usd = self.schedule_runs_per_month, self.usd
        return {
            "name": self.name,
            "state": self.state,
            "errors": self.errors,
            "doubts": self.doubts,
            "train_hours": self.train_hours,
            "train_hours_range": self._range(_train_hours_range),
            "usd": usd,
            "usd_range": self._range(lambda plan: plan.cost.usd_range if plan.cost else None),
            "schedule_runs_per_month": runs,
            "bill": self.bill.as_dict() if self.bill else None,
            "schedule_usd_per_month": None if runs is None or usd is None else runs * usd,
            "stages": {
                name: {"starts_from": self.starts[name], "data": self.data[name], **plan.as_dict()}
                for name, plan in self.stages.items()
            },
        }


def plan_whole_run(config: RunConfig, *, here: LocalMachine | None = None, last: Stage = WHOLE) -> Plan | StagesPlan:
    """Plan a run with all its stages; one without stages has the plan of its only training.

    Each stage is taken to encode all its images. `last`: of the last stage. Raises UserError that names the stage.
    """
    if not config.stages:
        return plan_run(config, here=here, stage=last)
    runs, plans = config.stage_runs(), dict[str, Plan]()
    for name, run in runs.items():
        with naming_stage(name):
            place = last if name == list(runs)[-1] else Stage(is_last=False)
            plans[name] = plan_run(run, here=here, stage=dataclasses.replace(place, is_first=not plans))
    names = list(runs)
    weights = [part.weights for part in config.model.sources.values() if part and part.weights]
    starts = {name: f"export of {before}" for before, name in itertools.pairwise(names)}
    return StagesPlan(
        name=config.name,
        stages=plans,
        starts={names[0]: ", ".join(dict.fromkeys(weights)) or "random weights", **starts},
        data={name: run.data.described() for name, run in runs.items()},
        schedule_runs_per_month=runs_per_month(config.schedule.cron) if config.schedule and not here else None,
    )


def _train_hours_range(plan: Plan) -> tuple[float, float] | None:
    time = plan.time
    if time is None or time.train_hours is None or time.interval is None:
        return None
    return time.interval.low * time.train_hours, time.interval.high * time.train_hours
