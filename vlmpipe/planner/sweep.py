"""The plan of a sweep: what all variants share, each variant, and their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmpipe.catalog.this_machine import LocalMachine, this_machine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.stages import naming_stage
from vlmpipe.config.sections.sweep import variants_of
from vlmpipe.planner.cost.bill import Bill, bill_of_sweep
from vlmpipe.planner.cost.estimate import StepCost
from vlmpipe.planner.plan import STATES, Plan, State, plan_run
from vlmpipe.planner.stages import StagesPlan, plan_whole_run
from vlmpipe.planner.steps.estimate import Stage
from vlmpipe.trainer.storage.outage import answering_soon

OF_A_TRAINING = ("train", "evaluate")  # jobs of a run that a training of the sweep does; others are shared


@dataclass(frozen=True)
class VariantPlan:
    """One training of a variant. `plan` is None for one that trains nothing. None: not known."""

    name: str
    plan: Plan | None
    train_hours: float | None
    evaluate_hours: float | None
    usd: float | None


@dataclass(frozen=True)
class SweepPlan:
    """`shared` is the plan of the run file without its sweep: of its last stage the feature cache is shared, and of the
    stages before all."""

    name: str
    shared: Plan | StagesPlan
    variants: dict[str, VariantPlan]
    starts: int
    parallelism: int
    jobs: int  # by which all trainings are done
    is_priced: bool

    @property
    def stages(self) -> dict[str, Plan]:
        return self.shared.stages

    @property
    def trainings(self) -> int:
        return self.starts * len(self.variants)

    @property
    def state(self) -> State:
        """The state of the worst variant or shared stage."""
        states = [variant.plan.state for variant in self.variants.values() if variant.plan]
        return max([self.shared.state, *states], key=STATES.index)

    @property
    def errors(self) -> list[str]:
        """Why the sweep would fail, a line each; one that all variants have once."""
        errors = {name: variant.plan.errors for name, variant in self.variants.items() if variant.plan}
        return [*self.shared.errors, *_named(errors, self.shared.errors)]

    @property
    def doubts(self) -> list[str]:
        """Why a plan without errors is amber, a phrase each."""
        doubts = {name: variant.plan.doubts for name, variant in self.variants.items() if variant.plan}
        return [*self.shared.doubts, *_named(doubts, self.shared.doubts)]

    @property
    def shared_steps(self) -> list[StepCost] | None:
        """Jobs that run once; None where the cost is not known."""
        *earlier, last = self.stages.values()
        if any(plan.cost is None for plan in self.stages.values()):
            return None
        steps = [step for plan in earlier if plan.cost for step in plan.cost.steps]
        return steps + [step for step in (last.cost.steps if last.cost else ()) if step.job not in OF_A_TRAINING]

    @property
    def train_hours(self) -> float | None:
        """Hours of training, of the stages before and of all trainings, one after the other."""
        earlier = [plan.time.train_hours if plan.time else None for plan in list(self.stages.values())[:-1]]
        return _sum([*earlier, *self._each(lambda variant: variant.train_hours)])

    @property
    def hours(self) -> float | None:
        """Hours of all jobs, one after the other."""
        of_trainings = self._each(lambda variant: _sum([variant.train_hours, variant.evaluate_hours]))
        return _sum([self._shared(lambda step: step.hours), *of_trainings])

    @property
    def elapsed_hours(self) -> float | None:
        """Hours from start to end, with `parallelism` jobs at a time that all take as long."""
        shared, whole = self._shared(lambda step: step.hours), self.hours
        if shared is None or whole is None:
            return None
        return shared + (whole - shared) / min(self.parallelism, self.jobs)

    @property
    def usd(self) -> float | None:
        """Cost of the whole sweep."""
        if not self.is_priced:
            return None
        return _sum([self._shared(lambda step: step.usd), *self._each(lambda variant: variant.usd)])

    @property
    def usd_range(self) -> tuple[float, float] | None:
        """If all trainings take the low or the high share of their planned time."""
        plans = [variant.plan for variant in self.variants.values() if variant.plan]
        ends = [_around(plan) for plan in [*list(self.stages.values())[:-1], *plans * self.starts]]
        known, usd = [end for end in ends if end is not None], self.usd
        if usd is None or len(known) < len(ends):
            return None
        return usd + sum(low for low, _ in known), usd + sum(high for _, high in known)

    @property
    def bill(self) -> Bill | None:
        """The bill of all trainings and of what they share; None where a part has none."""
        shared = [plan.bill for plan in self.stages.values() if plan.bill]
        plans = [variant.plan for variant in self.variants.values() if variant.plan]
        bills = [plan.bill for plan in plans if plan.bill]
        if not self.is_priced or len(shared) < len(self.stages) or len(bills) < len(plans):
            return None
        return bill_of_sweep(self.usd, self._storage_usd_per_month(), shared, bills * self.starts)

    def _storage_usd_per_month(self) -> float | None:
        """Storage of earlier stages, of the features that all trainings share, and of each training."""
        *earlier, last = self.stages.values()
        before = [plan.bill.storage_usd_per_month if plan.bill else None for plan in earlier]
        of_each = [_kept_usd(variant.plan)[0] for variant in self.variants.values() if variant.plan]
        return _sum([*before, _kept_usd(last)[1], *of_each * self.starts])

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        bill = self.bill
        return {
            "name": self.name,
            "state": self.state,
            "errors": self.errors,
            "doubts": self.doubts,
            "train_hours": self.train_hours,
            "hours": self.hours,
            "elapsed_hours": self.elapsed_hours,
            "usd": self.usd,
            "usd_range": self.usd_range,
            "bill": bill.as_dict() if bill else None,
            "starts": self.starts,
            "parallelism": self.parallelism,
            "trainings": self.trainings,
            "shared_hours": self._shared(lambda step: step.hours),
            "shared_usd": self._shared(lambda step: step.usd) if self.is_priced else None,
            "shared": self.shared.as_dict(),
            "variants": {
                name: {
                    "state": variant.plan.state if variant.plan else "green",
                    "trains": variant.plan is not None,
                    "train_hours": variant.train_hours,
                    "evaluate_hours": variant.evaluate_hours,
                    "usd": variant.usd,
                    "memory": variant.plan.as_dict()["memory"] if variant.plan else None,
                    "steps": variant.plan.time.steps if variant.plan and variant.plan.time else 0,
                }
                for name, variant in self.variants.items()
            },
        }

    def _shared(self, value: Callable[[StepCost], float | None]) -> float | None:
        steps = self.shared_steps
        return None if steps is None else _sum([value(step) for step in steps])

    def _each(self, value: Callable[[VariantPlan], float | None]) -> list[float | None]:
        return [value(variant) for variant in self.variants.values()] * self.starts


def plan_config(config: RunConfig, *, here: LocalMachine | None = None) -> Plan | StagesPlan | SweepPlan:
    """Plan a run file: one training, its stages, or a sweep. Raises UserError that names the stage or the variant.

    `here`: the machine of a local run.
    """
    with answering_soon():
        return plan_sweep(config, here=here) if config.sweep else plan_whole_run(config, here=here)


def require_runnable(config: RunConfig) -> list[str]:
    """Raise UserError where planning finds a model that cannot be built or trained, for a run on this machine.

    Weights that are not at hand here are left to the job. Returns why the plan is red, a line each: memory is an
    estimate, and what is free changes.
    """
    return plan_config(config, here=this_machine()).errors


def plan_sweep(config: RunConfig, *, here: LocalMachine | None = None) -> SweepPlan:
    """Plan every variant of the sweep. Raises UserError that names the variant or the stage."""
    assert config.sweep
    last_stage = Stage(sweep=config.sweep, sweep_jobs=_jobs(config))
    shared = plan_whole_run(config.model_copy(update={"sweep": None}), here=here, last=last_stage)
    last = list(shared.stages.values())[-1]
    variants = {}
    for variant in variants_of(config.sweep):
        run = config.training_of(variant)
        with naming_stage(variant.name, kind="variant"):
            variants[variant.name] = _variant(variant.name, run, last, here)
    return SweepPlan(
        config.name, shared, variants, config.sweep.starts, config.sweep.parallelism, _jobs(config), here is None
    )


def _jobs(config: RunConfig) -> int:
    """Trainings of equal machines share jobs, see `vlmpipe.components.runtime.sweep_steps.write_sweep`."""
    assert config.sweep
    clusters = Counter(config.variant(variant).cluster.model_dump_json() for variant in variants_of(config.sweep))
    return sum(-(-config.sweep.starts * count // config.sweep.trainings_per_job) for count in clusters.values())


def _variant(name: str, run: RunConfig, last: Plan, here: LocalMachine | None) -> VariantPlan:
    plan = plan_run(run, here=here) if run.train.epochs else None
    cost = (plan or last).cost
    steps = {step.job: step for step in cost.steps} if cost else {}
    evaluation = steps.get("evaluate")
    evaluate_hours = evaluation.hours if evaluation else None
    if plan is None:
        return VariantPlan(name, None, 0.0, evaluate_hours, evaluation.usd if evaluation else None)
    training = steps.get("train")
    train_hours = training.hours if training else plan.time.train_hours if plan.time else None
    usd = _sum([training.usd, evaluation.usd]) if training and evaluation else None
    return VariantPlan(name, plan, train_hours, evaluate_hours, usd)


def _kept_usd(plan: Plan) -> tuple[float | None, float | None]:
    """Dollars a month for what a training keeps, and for its features."""
    cost, cache = plan.cost, plan.features_cache
    if cost is None or cost.storage_usd_per_month is None or not cost.storage_bytes:
        return None, None
    features = (cache.bytes or 0) / cost.storage_bytes if cache and cache.state == "on" else 0.0
    return (1 - features) * cost.storage_usd_per_month, features * cost.storage_usd_per_month


def _around(plan: Plan) -> tuple[float, float] | None:
    """Dollars less and more than planned that a run may cost."""
    cost = plan.cost
    if cost is None or cost.usd is None or cost.usd_range is None:
        return None
    return cost.usd_range[0] - cost.usd, cost.usd_range[1] - cost.usd


def _named(by_variant: dict[str, list[str]], shared: Sequence[str]) -> list[str]:
    """Texts of variants that are not the run file's own, each once, with the first variants that have it."""
    variants = dict[str, list[str]]()
    for name, texts in by_variant.items():
        for text in texts:
            if text not in shared:
                variants.setdefault(text, []).append(name)
    return [
        f"variant {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"
        for text, names in variants.items()
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
