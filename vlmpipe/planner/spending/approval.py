"""Decides whether a plan may be submitted: a red one may not, and spending needs approval."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from vlmpipe.job_spec.build import Job, reducer_count
from vlmpipe.planner.spending.ledger import enter
from vlmpipe.planner.steps.estimate import HOURS_PER_MONTH
from vlmpipe.trainer.confinement.limits import limits
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.planner.plan import Plan
    from vlmpipe.planner.stages import StagesPlan
    from vlmpipe.planner.sweep import SweepPlan

CENT = 0.01  # requests that cost less are not told


@dataclass(frozen=True)
class Spending:
    """Figures that approval depends on."""

    name: str
    state: str  # green, amber or red
    errors: tuple[str, ...]  # why it is red, a line each
    usd: float | None  # of the whole run on `term`; None: not known, and `unknown` says why
    hours: float | None  # of all jobs
    machines: str
    term: str  # standard, spot or flex_start
    unknown: str = ""
    left_out: str = ""  # prices and hours that are not known and not in `usd`
    usd_range: tuple[float, float] | None = None  # by the error of a forecast of the hours
    serving_usd_per_month: float = 0.0  # of the endpoint that the run leaves
    requests_usd: float = 0.0  # of training to its buckets, beside `usd`
    endpoint_sleeps: bool = False  # serving_usd_per_month is then that of being woken once

    def times(self, runs: float, name: str) -> Spending:
        """The figures of `runs` such runs together, which may be a mean."""
        return dataclasses.replace(
            self,
            name=name,
            usd=None if self.usd is None else runs * self.usd,
            hours=None if self.hours is None else runs * self.hours,
            usd_range=None if self.usd_range is None else (runs * self.usd_range[0], runs * self.usd_range[1]),
            requests_usd=runs * self.requests_usd,
        )


@dataclass(frozen=True)
class Approved:
    """Permission to spend, which `require_approval` alone gives. Every function that starts paid machines takes it."""

    spending: Spending


def spending_of(config: RunConfig, plan: Plan | StagesPlan | SweepPlan) -> Spending:
    """Figures that approval depends on, from a plan; of several stages and of a sweep's trainings the sums."""
    spending = _of_stages(config, plan)
    if not config.sweep:
        return spending
    whole: SweepPlan = plan  # type: ignore[assignment]
    name = f"{whole.name}: {whole.trainings} trainings"
    unknown = spending.unknown or "of some variant it is not known"
    return dataclasses.replace(
        spending.times(whole.trainings, name),
        usd=whole.usd,
        hours=whole.hours,
        unknown=unknown,
        usd_range=whole.usd_range,
    )


def _of_stages(config: RunConfig, plan: Plan | StagesPlan | SweepPlan) -> Spending:
    spendings = [_of_stage(run, plan.stages[stage], stage) for stage, run in config.stage_runs().items()]
    usd = [spending.usd for spending in spendings if spending.usd is not None]
    hours = [spending.hours for spending in spendings if spending.hours is not None]
    ranges = [spending.usd_range for spending in spendings if spending.usd_range is not None]
    return Spending(
        name=config.name,
        state=plan.state,
        errors=tuple(plan.errors),
        usd=sum(usd) if len(usd) == len(spendings) else None,
        hours=sum(hours) if len(hours) == len(spendings) else None,
        machines=", then ".join(dict.fromkeys(spending.machines for spending in spendings)),
        term=", then ".join(dict.fromkeys(spending.term for spending in spendings)),
        unknown="; ".join(spending.unknown for spending in spendings if spending.usd is None),
        left_out="; ".join(dict.fromkeys(spending.left_out for spending in spendings if spending.left_out)),
        usd_range=(sum(low for low, _ in ranges), sum(high for _, high in ranges))
        if len(ranges) == len(spendings)
        else None,
        serving_usd_per_month=sum(spending.serving_usd_per_month for spending in spendings),
        endpoint_sleeps=any(spending.endpoint_sleeps for spending in spendings),
        requests_usd=sum(spending.requests_usd for spending in spendings),
    )


def _of_stage(config: RunConfig, plan: Plan, stage: str) -> Spending:
    cost, serving = plan.cost, plan.bill.serving if plan.bill else None
    unpriced = [f"a month of serving on {serving.machines}"] if serving and serving.missing else []
    hours = [step.hours for step in cost.steps if step.hours is not None] if cost else []
    return Spending(
        name=stage,
        state=plan.state,
        errors=tuple(plan.errors),
        usd=cost.usd if cost else None,
        hours=sum(hours) if cost and len(hours) == len(cost.steps) else None,
        machines=machines_of(config),
        term=cost.term if cost else config.cluster.scheduling_strategy,
        unknown=f"stage {stage}: {_why_not_known(plan)}" if stage else _why_not_known(plan),
        left_out=", ".join([*(cost.left_out if cost and cost.is_lower_bound else ()), *unpriced]),
        usd_range=cost.usd_range if cost else None,
        serving_usd_per_month=(serving.usd_per_month or serving.usd_per_wake or 0.0) if serving else 0.0,
        requests_usd=(plan.bill.requests_usd or 0.0) if plan.bill else 0.0,
        endpoint_sleeps=bool(serving and serving.usd_per_wake),
    )


def _why_not_known(plan: Plan) -> str:
    if plan.cost is None:
        return next(iter(plan.notes), "the plan says no cost")
    steps = plan.cost.steps
    reasons = [f"no price of {name}" for name in plan.cost.missing]
    reasons += [f"no hours of {step.job}" for step in steps if step.hours is None]
    if plan.load is None or plan.load.steps is None:
        reasons.append("plan.samples does not say how many samples there are")
    known = [step.usd for step in steps if step.usd is not None]
    return ", ".join(reasons) + (f"; {dollars(sum(known))} of it are known" if known else "")


def on_own_machines(config: RunConfig, spending: Spending) -> Spending:
    """The figures on machines that have no price here: at most plan.machine.usd_per_hour of each in all hours.

    The endpoint's replicas, a month of them, are taken to cost as much each.
    """
    runs, hours = list(config.stage_runs().values()), spending.hours
    stated = [run.plan.machine.usd_per_hour for run in runs]
    known = [usd_per_hour for usd_per_hour in stated if usd_per_hour is not None]
    unknown = "the hours are not known"
    if len(known) < len(stated):
        unknown = "machines of your own have no price here; plan.machine.usd_per_hour states one"
    usd, serving = None, 0.0
    if len(known) == len(stated) and (hours is not None or not any(known)):
        jobs = (job for run in runs for job in (run.cluster, *map(run.cluster.of_job, get_args(Job))))
        usd = max(known) * max(job.replica_count for job in jobs) * (hours or 0.0)
        serving = max(known) * HOURS_PER_MONTH * sum(run.deploy.min_replicas for run in runs if run.deploy)
    return dataclasses.replace(
        spending, usd=usd, unknown=unknown, left_out="", usd_range=None, serving_usd_per_month=serving, requests_usd=0.0
    )


def machines_of(config: RunConfig) -> str:
    """The training job's machines, for example "4 x a2-ultragpu-8g + 13 x n1-highcpu-16"."""
    cluster = config.cluster
    pools = [f"{cluster.replica_count} x {cluster.machine_type}"]
    if cluster.reduction_server:
        pools.append(f"{reducer_count(cluster)} x {cluster.reduction_server.machine_type}")
    return " + ".join(pools)


def fail_on_error(plan: Spending, *, force: bool) -> None:
    """Raise ConfigError for a plan with errors, unless forced."""
    if plan.state == "red" and not force:
        raise ConfigError(
            "\n".join([f"not submitted: the plan of {plan.name} is red", *(f"  {error}" for error in plan.errors)]),
            expected="a plan without errors: what is red here fails later, on machines that are paid for",
            fix="correct what is named and look again with vlmpipe plan\n"
            "--force overrides the estimate of memory; nothing starts jobs that Vertex AI would refuse",
        )


def require_approval(
    plan: Spending,
    *,
    confirm_above_usd: float,
    force: bool,
    yes: bool,
    dry_run: bool,
    ask: Callable[[str], bool] | None,
) -> Approved:
    """Return the approval of what `plan` costs. Where a server of tools sets caps, those are the answer.

    Args:
        plan: what the planner found.
        confirm_above_usd: the run file's plan.confirm_above_usd. A run of unknown cost is asked about too.
        force: submit a red plan. It says nothing about money.
        yes: the answer to the question, given beforehand.
        dry_run: nothing is sent, so nothing is spent.
        ask: asks a person; None without a terminal.

    Raises ConfigError for a red plan and for a question without a terminal to ask on, UserError (exit 130) after a no.
    """
    fail_on_error(plan, force=force)
    if not dry_run and (caps := limits()):
        enter(caps, plan.name, max_usd(plan), _unknown_part(plan))
        return Approved(plan)
    needs = reasons_to_confirm(plan, confirm_above_usd)
    if not needs or yes or dry_run:
        return Approved(plan)
    if ask is None:
        raise ConfigError(
            f"not submitted: {needs}, and there is no terminal to ask in",
            expected="a yes before this is spent",
            fix="add --yes, or raise plan.confirm_above_usd if the plan knows the cost",
        )
    if not ask(f"{needs}.\nSubmit it?"):
        raise UserError("not submitted: the answer was no; nothing was sent", code=ExitCode.INTERRUPTED)
    return Approved(plan)


def max_usd(plan: Spending) -> float | None:
    """US dollars that a run may cost: the upper end of its forecast, a month of its endpoint; None: not known."""
    if plan.usd is None:
        return None
    highest = plan.usd_range[1] if plan.usd_range else plan.usd
    return max(highest, plan.usd) + plan.requests_usd + plan.serving_usd_per_month


def _unknown_part(plan: Spending) -> str:
    return plan.unknown if plan.usd is None else plan.left_out


def reasons_to_confirm(plan: Spending, confirm_above_usd: float) -> str:
    """Why the run needs a confirmation, as a clause; empty if it needs none."""
    hours = "hours not known" if plan.hours is None else f"about {plan.hours:,.1f} h"
    where = f"{hours}, {plan.machines}, {plan.term}"
    if plan.usd is None:
        return f"what {plan.name} will cost is not known: {plan.unknown} ({where})"
    serving, threshold = plan.serving_usd_per_month, f"more than plan.confirm_above_usd, {dollars(confirm_above_usd)}"
    is_more = plan.usd + plan.requests_usd + serving > confirm_above_usd
    if not (is_more or plan.left_out):
        return ""
    least, lacking = ("at least ", f", without what is not known: {plan.left_out}") if plan.left_out else ("", "")
    if not is_more:
        return f"{plan.name} costs {least}{dollars(plan.usd)}{lacking} ({where})"
    between = f" ({' to '.join(map(dollars, plan.usd_range))})" if plan.usd_range else ""
    beside = [f", and requests to buckets {dollars(plan.requests_usd)}"] if plan.requests_usd >= CENT else []
    often = "each time that it is woken" if plan.endpoint_sleeps else "a month"
    beside += [f", and its endpoint then {dollars(serving)} {often}"] if serving else []
    together = f"{''.join(beside)}, together" if beside else ","
    return (
        f"{plan.name} is planned to cost {least}{dollars(plan.usd)}{between}{lacking} ({where}){together} {threshold}"
    )


def dollars(usd: float) -> str:
    """An amount for people, cents only where they matter."""
    return f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}"


def terminal_confirm() -> Callable[[str], bool] | None:
    """A function that asks in the terminal, on stderr; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask(question: str) -> bool:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        try:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
        except KeyboardInterrupt:  # Ctrl-C at a question is a no
            print(file=sys.stderr)
            return False

    return ask
