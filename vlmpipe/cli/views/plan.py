"""Tables of a plan for a terminal: whether it fits, time and cost first, notes last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount, between, hours_text
from vlmpipe.cli.views.cost.bill import bill_blocks
from vlmpipe.cli.views.memory_bar import GIB, jobs_memory, memory_blocks, share_text
from vlmpipe.cli.views.pipeline_steps import pipeline_steps
from vlmpipe.cli.views.stages import stages_headline, stages_table
from vlmpipe.cli.views.sweep import sweep_headline, sweep_table
from vlmpipe.cli.views.tables import FINDING_LOOKS, PLAN_LOOKS, grid, ruled_table, standard_output
from vlmpipe.planner.cost.estimate import DECISIVE
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.records.plan_json import (
    BillJson,
    CostJson,
    FindingJson,
    LostJson,
    MemoryJson,
    ModelJson,
    PlanJson,
    PoolJson,
    StagesPlanJson,
    StepCostJson,
    SweepPlanJson,
    TermCostJson,
    TimeJson,
)

WIDEST = 120  # longer lines are hard to follow
WITH_DISKS = 100
TERMS = ("standard", "spot", "flex_start")
ENCODED_ANEW = "Each stage is taken to encode all its images; features that an earlier stage made make it cheaper."


def print_plan_tables(plan: Mapping[str, object], screen: Console | None = None, *, verbose: bool = False) -> None:
    """Print the `as_dict()` of a Plan, StagesPlan or SweepPlan. `screen`: where to; by default standard output.

    `verbose`: with what the figures assume, which else is counted.
    """
    screen = screen or standard_output()
    width = min(screen.width, WIDEST)
    for block in _blocks_of(plan, width, verbose):
        screen.print(block, width=width)


def _blocks_of(plan: Mapping[str, object], width: int, verbose: bool) -> Iterator[RenderableType]:
    if "variants" in plan:
        return sweep_blocks(cast(SweepPlanJson, plan), width, verbose)
    if "stages" in plan:
        return stages_blocks(cast(StagesPlanJson, plan), width, verbose)
    return plan_blocks(cast(PlanJson, plan), width, verbose)


def sweep_blocks(plan: SweepPlanJson, width: int, verbose: bool) -> Iterator[RenderableType]:
    """The variants side by side with the sum, then the plan of what they share."""
    yield _state_line(plan)
    yield Text(sweep_headline(plan), style="bold")
    yield from (Text(f"  {error}", style="red") for error in plan["errors"])
    yield ""
    yield sweep_table(plan)
    if bill := plan.get("bill"):
        yield from bill_blocks(bill)
    yield ""
    yield Rule(Text("the run file without its sweep", style="bold"), align="left", style="dim")
    yield from _blocks_of(cast(Mapping[str, object], plan["shared"]), width, verbose)


def stages_blocks(plan: StagesPlanJson, width: int, verbose: bool) -> Iterator[RenderableType]:
    """The stages side by side with their sum, then the plan of each."""
    stages = plan["stages"]
    yield _state_line(plan)
    yield Text(stages_headline(plan), style="bold")
    yield ""
    yield stages_table(plan)
    if bill := plan.get("bill"):
        yield from bill_blocks(bill)
    for name, stage in stages.items():
        yield ""
        yield Rule(Text(f"stage {name}", style="bold"), align="left", style="dim")
        yield from _blocks(stage, width)
    yield from _remarks(*stages.values(), also=[ENCODED_ANEW], verbose=verbose)


def plan_blocks(plan: PlanJson, width: int, verbose: bool) -> Iterator[RenderableType]:
    """The plan's parts from the top down."""
    yield from _blocks(plan, width)
    yield from _remarks(plan, verbose=verbose)


def _state_line(plan: PlanJson | StagesPlanJson | SweepPlanJson) -> Text:
    sign, style = PLAN_LOOKS[plan["state"]]
    reasons = f": {', '.join(plan['doubts'])}" if plan["state"] == "amber" else ""
    return Text.assemble((f"{sign} {plan['state']}", style), (f"  {plan['name']}", "bold"), reasons)


def _blocks(plan: PlanJson, width: int) -> Iterator[RenderableType]:
    """All parts but notes and assumptions."""
    yield _state_line(plan)
    yield Text(headline(plan), style="bold")
    if plan["model"]:
        yield Text(_model_line(plan["model"]), style="dim")
    yield from (Text(error, style="red") for error in _unshown_errors(plan))
    if plan["findings"]:
        yield ""
        yield from (_finding(finding) for finding in sorted(plan["findings"], key=lambda finding: finding["severity"]))
    if plan["memory"]:
        yield from memory_blocks(plan["memory"], width)
    yield from jobs_memory(plan["memory_beside_training"])
    if plan["time"]:
        yield from _time(plan["time"])
    if plan["cost"]:
        yield from _cost(plan["cost"], plan.get("bill"))
    yield from _advice(plan)
    yield ""
    if here := plan["this_machine"]:
        yield Text(_on_this_machine(plan["jobs"], here["text"]))
    else:
        yield machines_table(plan["jobs"], width)
    if pipeline := plan["pipeline"]:
        yield ""
        yield from pipeline_steps(pipeline)


def headline(plan: PlanJson) -> str:
    """Memory, hours and dollars in one sentence; a plan with a time and no cost is that of a local run."""
    fit = "memory of an unknown trainer is not planned" if plan["trainer"] else _fit(plan["memory"])
    unsure = "if it fitted, " if plan["memory"] and fit.startswith("does not fit") else ""
    if plan["cost"] and plan["cost"]["never_ends"]:
        return f"{fit[0].upper()}{fit[1:]}; training never ends on {plan['cost']['term']}: interruptions take it back."
    facts = [fit, unsure + _hours(plan["time"])]
    if plan["cost"] or not plan["time"]:
        facts.append(_price(plan["cost"]))
    sentence = f"{'; '.join(facts)}."
    return sentence[0].upper() + sentence[1:]


def machines_table(jobs: Mapping[str, Sequence[PoolJson]], width: int = WIDEST) -> Table:
    """The worker pools of each job. Boot disks only where there is room."""
    wide = width >= WITH_DISKS
    table = ruled_table("job", "pool", "machines", "accelerators of each", *(["boot disk"] if wide else []))
    for job, pools in jobs.items():
        for pool in pools:
            count, disk_gb = pool["accelerator_count"], pool["boot_disk_size_gb"]
            disk = f"{disk_gb} GB {pool['boot_disk_type']}" if disk_gb else "–"
            table.add_row(
                job,
                pool["role"],
                f"{pool['replica_count']} x {pool['machine_type']}",
                f"{count} x {pool['accelerator_type']}" if count else "–",
                *([disk] if wide else []),
            )
            job = ""  # named once, in its first line
    return table


def _on_this_machine(jobs: Mapping[str, Sequence[PoolJson]], machine: str) -> str:
    """Describe what the jobs of a local run start, and where."""
    started = []
    for job, (pool,) in jobs.items():
        launchers, processes = pool["replica_count"], pool["processes_per_replica"]
        entry = f"{processes} process{'es' if processes > 1 else ''}"
        several = f"{launchers} launchers of {entry} each" if launchers > 1 else entry
        started.append(f"{job.replace('_', '-')} in {several}")
    return f"On this machine ({machine}): {', '.join(started)}."


def _fit(memory: MemoryJson | None) -> str:
    if memory is None:
        return f"memory {UNKNOWN}"
    total, capacity = memory["total_bytes"] / GIB, memory["capacity_bytes"] / GIB
    where = f"{total:,.1f} of {capacity:,.1f} GiB per {memory['device']}"
    spare = memory["spare_bytes"] / GIB
    if memory["is_near"]:
        return f"may fit: {where}, {-spare:,.1f} too much, within the error of the estimate"
    if spare >= 0 and not memory["fits"]:
        return f"does not fit: {where}, but too little of the machine's own memory"
    return f"fits: {where}, {spare:,.1f} spare" if memory["fits"] else f"does not fit: {where}, {-spare:,.1f} too much"


def _hours(time: TimeJson | None) -> str:
    if time is None:
        return f"time {UNKNOWN}"
    if time["train_hours"] is None:
        step_s = time["step_s"]
        return f"time {UNKNOWN}" if step_s is None else f"{_seconds(step_s)} a step, training hours {UNKNOWN}"
    hours, interval = time["train_hours"], time["interval"]
    around = f" ({between(interval['low'] * hours, interval['high'] * hours)})" if interval else ""
    return f"training {hours_text(hours)}{around}"


def _price(cost: CostJson | None) -> str:
    if cost is None:
        return f"cost {UNKNOWN}"
    if cost["usd"] is None:
        train = _step_of(cost, "train")
        rate = train["usd_per_hour"] if train else None
        if rate is not None:
            return f"cost {UNKNOWN}, {dollars(rate)} an hour of training"
        known = [step["usd"] for step in cost["steps"] if step["usd"] is not None]
        least = f", at least {dollars(sum(known))}" if known else ""
        return f"cost {UNKNOWN}{least}" + (f": no price of {cost['missing'][0]}" if cost["missing"] else "")
    ends = cost["usd_range"]
    around = f" ({dollars(ends[0])} to {dollars(ends[1])})" if ends else ""
    least = "at least " if cost["is_lower_bound"] else ""
    return f"{least}{dollars(cost['usd'])}{around} on {cost['term']}"


def _model_line(model: ModelJson) -> str:
    frozen = f", frozen: {', '.join(model['frozen'])}" if model["frozen"] else ""
    whole, trained = model["parameters"], model["trainable_parameters"]
    return f"{_parameters(whole)} parameters, {_parameters(trained)} trained{frozen}; sizes from: {model['origin']}"


def _unshown_errors(plan: PlanJson) -> list[str]:
    """Errors that neither the table of findings, which are the first ones, nor the headline has."""
    findings = sum(finding["severity"] == "error" for finding in plan["findings"])
    memory = plan["memory"]
    reason = f"does not fit: {memory['total_bytes'] / GIB:,.1f} GiB on " if memory else UNKNOWN
    return [error for error in plan["errors"][findings:] if not error.startswith(reason)]


def _finding(finding: FindingJson) -> Table:
    sign, style = FINDING_LOOKS["failed" if finding["severity"] == "error" else "warning"]
    table = grid(columns=2)
    table.add_row(Text(f"{sign} {finding['code']}", style=style), Text(finding["path"], style="bold"))
    what = f"{finding['found']} → {finding['expected']}" if finding["expected"] else finding["found"]
    table.add_row("", Text(what))
    if finding["fix"]:
        table.add_row("", Text(finding["fix"], style="dim"))
    return table


def _time(time: TimeJson) -> Iterator[RenderableType]:
    yield ""
    step_s = time["step_s"]
    if step_s is None:
        yield Text.assemble(("Time of a step: unknown.", "bold"), f" {time['assumptions'][0]}")
        return
    facts = [f"bottleneck: {time['binds']}"]
    facts.append(f"MFU {time['mfu']:.0%}" if time["mfu"] is not None else f"MFU {UNKNOWN}")
    if time["tokens_per_s_per_gpu"] is not None:
        facts.append(f"{time['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU")
    facts.append(f"{time['steps']:,} steps" if time["steps"] is not None else f"number of steps {UNKNOWN}")
    yield Text.assemble((f"Time of a step: {_seconds(step_s)}", "bold"), f"  {' · '.join(facts)}")
    table = ruled_table("part", "time", "share", "", right=("time", "share"))
    for part in time["parts"]:
        if part["hidden"]:
            table.add_row(Text(part["name"], style="dim"), _seconds(part["s"]), "", Text("hidden", style="dim"))
        else:
            mark = Text("◂ bottleneck", style="bold") if part["name"] == time["binds"] else ""
            table.add_row(part["name"], _seconds(part["s"]), share_text(part["s"] / step_s), mark)
    yield table


def _cost(cost: CostJson, bill: BillJson | None) -> Iterator[RenderableType]:
    yield ""
    terms = {term: cost["by_term"][term] for term in TERMS}
    numbers = cost["option_numbers"]  # of a capacity fallback
    table = ruled_table("cost", wrap=False)
    for term in terms:
        chosen = term == cost["term"]
        mark = f" ◂ option {numbers[term]}" if term in numbers else " ◂ run file" if chosen and not numbers else ""
        table.add_column(f"{term}{mark}", justify="right", style="bold" if chosen else "")
    table.add_row("whole run", *(amount(costs["usd"]) if costs["possible"] else "–" for costs in terms.values()))
    for job in dict.fromkeys(step["job"] for costs in terms.values() for step in costs["steps"]):
        steps = [_step_of(costs, job) for costs in terms.values()]
        table.add_row(
            f"  {job}",
            *(_share(step) if costs["possible"] else "–" for costs, step in zip(terms.values(), steps, strict=True)),
        )
    table.add_row(
        "lost to interruptions", *(_lost(costs["lost"]) if costs["possible"] else "–" for costs in terms.values())
    )
    yield table
    for name, other_place in cost["elsewhere"].items():
        price = amount(other_place["usd"]) if other_place["possible"] else f"not possible: {other_place['why_not']}"
        yield Text(f"Option {numbers[name]}, {name}, in another region: {price}.")
    for term, costs in terms.items():
        if not costs["possible"]:
            yield Text(f"{term} is not possible: {costs['why_not']}.")
    possible = [costs for costs in terms.values() if costs["possible"]]
    missing = dict.fromkeys(name for costs in possible for name in costs["missing"])
    if missing:
        yield Text(f"No price is known for: {'; '.join(missing)}. It is not in the sums.", style="yellow")
    if bill:
        yield from bill_blocks(bill)
    yield Text(" ".join(_monthly(cost)))


def _monthly(cost: CostJson) -> Iterator[str]:
    yield f"Storage: {_size(cost['storage_bytes'])}, {amount(cost['storage_usd_per_month'])} a month."
    if requests := cost.get("requests"):  # plans of earlier releases have none
        step = f"{requests['step']:,.3g} a step (data.shard_reading: {requests['reading']})"
        yield f"Requests: {step}, {requests['save']:,.0f} a save."
    runs, monthly = cost["schedule_runs_per_month"], cost["schedule_usd_per_month"]
    if runs is not None:
        yield f"Schedule: {runs:,.1f} runs a month, {amount(monthly)}."
    steps, every_s = cost["checkpoint_every_steps"], cost["checkpoint_every_s"]
    if steps is not None and every_s is not None:
        every = f"{steps:,} ({_seconds(every_s)})"
        yield f"Suggested train.checkpoint_every_steps: {every}, which loses least to interruptions."


def _advice(plan: PlanJson) -> Iterator[RenderableType]:
    """Resolved choices, choices that would pay, and the transport that NCCL is expected to use between nodes."""
    rows = [
        ("Compiled layers", plan["compile"]),
        ("Feature cache", plan["features_cache"]),
        ("Reduction Server", plan["reduction_server"]),
    ]
    table = grid(columns=2)
    for name, advice in rows:
        if advice:
            table.add_row(Text(name, style="bold"), Text(f"{advice['state']}: {advice['why']}."))
    if plugin := plan["nccl_plugin"]:
        table.add_row(Text("NCCL plugin", style="bold"), Text(f"{plugin}."))
    if table.row_count:
        yield ""
        yield table


def _remarks(*plans: PlanJson, also: Sequence[str] = (), verbose: bool) -> Iterator[RenderableType]:
    """Notes, each once, and the assumptions or their number."""
    notes, assumed = [note for plan in plans for note in plan["notes"]], [*also]
    for plan in plans:
        for part in (plan["time"], plan["cost"], plan["pipeline"]):
            assumed += part["assumptions"] if part else []
        if plan["time"] and (interval := plan["time"]["interval"]):
            assumed.append(interval["origin"])
    notes = list(dict.fromkeys([*notes, *(line for line in assumed if line.startswith(DECISIVE))]))
    assumed = [line for line in dict.fromkeys(assumed) if line not in notes]
    yield from _listed("Notes", notes)
    if verbose:
        yield from _listed("Assumptions", assumed)
    elif assumed:
        yield Text(f"{len(assumed)} assumptions of these figures: --verbose lists them.", style="dim")


def _listed(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    table = grid(columns=2)
    for line in lines:
        table.add_row(Text("·", style="dim"), Text(line, style="dim"))
    if lines:
        yield Text(title, style="dim bold")
        yield table


def _step_of(term: TermCostJson | CostJson, job: str) -> StepCostJson | None:
    return next((step for step in term["steps"] if step["job"] == job), None)


def _share(step: StepCostJson | None) -> str:
    if step is None:
        return "–"
    if step["hours"] is None:
        rate = step["usd_per_hour"]
        return UNKNOWN if rate is None else f"{dollars(rate)} an hour"
    return f"{amount(step['usd'])}, {hours_text(step['hours'])}"


def _lost(lost: LostJson | None) -> str:
    if lost is None:
        return UNKNOWN
    hours = lost["rework_hours"] + lost["restarts_hours"]
    return hours_text(hours) if lost["interruptions"] else "none expected"


def _size(num_bytes: float) -> str:
    """Decimal units, as prices of storage use them."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.3g} {unit}"
    return f"{num_bytes / 1e6:,.3g} MB"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def _parameters(count: int) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)
