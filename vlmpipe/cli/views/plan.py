"""Tables of a plan for a terminal: whether it fits, time and cost first, notes last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, between, hours_text, seconds_text
from vlmpipe.cli.views.cost.bill import bill_lines
from vlmpipe.cli.views.cost.serving_places import places_blocks
from vlmpipe.cli.views.cost.terms import monthly_lines, step_of, terms_notes, terms_table
from vlmpipe.cli.views.memory_bar import GIB, host_lines, job_lines, memory_blocks, nearest_lines, share_text
from vlmpipe.cli.views.pipeline_steps import LEGEND, pipeline_steps
from vlmpipe.cli.views.stages import stage_inputs, stages_headline, stages_table
from vlmpipe.cli.views.sweep import sweep_headline, sweep_table
from vlmpipe.cli.views.tables import FINDING_LOOKS, PLAN_LOOKS, Grid, ruled_table, show, standard_output
from vlmpipe.planner.cost.estimate import DECISIVE
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.records.plan_json import (
    BillJson,
    CostJson,
    FindingJson,
    MemoryJson,
    ModelJson,
    PlanJson,
    PoolJson,
    StagesPlanJson,
    SweepPlanJson,
    TimeJson,
)
from vlmpipe.runs.terminal import TerminalConsole
from vlmpipe.trainer.printable import COLUMNS

ENCODED_ANEW = "Each stage is taken to encode all its images; features that an earlier stage made make it cheaper."


class _Printed:
    """The texts that a screen has printed: a stage names what it shares with one above instead of printing it again."""

    def __init__(self) -> None:
        self._texts = set[str]()
        self._shared: list[str] = []

    def is_new(self, part: str, text: str) -> bool:
        """Return whether the text was not printed yet; otherwise its part is named by `shared`."""
        if text in self._texts:
            has_a_name = any(letter.isupper() for letter in part[1:])
            self._shared.append(part if has_a_name else part.lower())
            return False
        self._texts.add(text)
        return True

    def new(self, part: str, blocks: Iterable[RenderableType]) -> list[RenderableType]:
        """The blocks, or none where they were printed already."""
        shown, screen = list(blocks), TerminalConsole(record=True)
        show(screen, *shown)
        text = screen.export_text()
        return shown if not text.strip() or self.is_new(part, text) else []

    def labelled(self, lines: Iterable[tuple[str, str]]) -> Iterator[Grid]:
        """Lines with a label that were not printed yet."""
        rows = Grid(columns=2)
        for name, text in lines:
            if self.is_new(name, f"{name} {text}"):
                rows.add_row(Text(name, style="bold"), text)
        if rows.row_count:
            yield rows

    def shared(self, title: str) -> Iterator[Text]:
        """The line that names the parts of this plan which are above already."""
        if self._shared:
            parts = ", ".join(dict.fromkeys(filter(None, self._shared)))
            yield Text(f"{title}, as above: {parts}.", style="dim")
        self._shared = []


def print_plan_tables(plan: Mapping[str, object], screen: Console | None = None, *, verbose: bool = False) -> None:
    """Print the `as_dict()` of a Plan, StagesPlan or SweepPlan. `screen`: where to; by default standard output.

    `verbose`: with what the figures assume, which else is counted.
    """
    screen = screen or standard_output()
    show(screen, *_blocks_of(plan, min(screen.width, COLUMNS), _Printed(), verbose))


def _blocks_of(
    plan: Mapping[str, object], width: int, printed: _Printed, verbose: bool, title: str = ""
) -> Iterator[RenderableType]:
    if "variants" in plan:
        return _sweep_blocks(cast(SweepPlanJson, plan), width, printed, verbose)
    if "stages" in plan:
        return _stages_blocks(cast(StagesPlanJson, plan), width, printed, verbose, title)
    return _plan_blocks(cast(PlanJson, plan), width, printed, verbose, title)


def _sweep_blocks(plan: SweepPlanJson, width: int, printed: _Printed, verbose: bool) -> Iterator[RenderableType]:
    """The variants side by side with the sum, then the plan of what they share."""
    yield _state_line(plan)
    yield Text(sweep_headline(plan), style="bold")
    yield from (Text(f"  {error}", style="red") for error in plan["errors"])
    yield ""
    yield sweep_table(plan)
    if bill := plan.get("bill"):
        yield from _bill(bill, printed)
    yield ""
    title = "the run file without its sweep"
    yield Rule(Text(title, style="bold"), align="left", style="dim")
    shared = cast(Mapping[str, object], plan["shared"])
    yield from _blocks_of(shared, width, printed, verbose, title[0].upper() + title[1:])


def _stages_blocks(
    plan: StagesPlanJson, width: int, printed: _Printed, verbose: bool, title: str
) -> Iterator[RenderableType]:
    """The stages side by side with their sum, then the plan of each."""
    stages = plan["stages"]
    yield _state_line(plan)
    yield Text(stages_headline(plan), style="bold")
    yield ""
    yield stages_table(plan)
    if bill := plan.get("bill"):
        yield from _bill(bill, printed)
    yield from printed.shared(title)
    for name, stage in stages.items():
        yield ""
        yield Rule(Text(f"stage {name}", style="bold"), align="left", style="dim")
        yield stage_inputs(stage)
        yield from _blocks(stage, width, printed)
        yield from printed.shared(f"Stage {name}")
    yield from _remarks(*stages.values(), also=[ENCODED_ANEW], verbose=verbose)


def _plan_blocks(plan: PlanJson, width: int, printed: _Printed, verbose: bool, title: str) -> Iterator[RenderableType]:
    """The plan's parts from the top down."""
    yield from _blocks(plan, width, printed)
    yield from printed.shared(title)
    yield from _remarks(plan, verbose=verbose)


def _state_line(plan: PlanJson | StagesPlanJson | SweepPlanJson) -> Text:
    sign, style = PLAN_LOOKS[plan["state"]]
    reasons = f": {', '.join(_grouped(plan['doubts']))}" if plan["state"] == "amber" else ""
    return Text.assemble((f"{sign} {plan['state']}", style), (f"  {plan['name']}", "bold"), reasons)


def _grouped(doubts: Sequence[str]) -> Iterator[str]:
    """Doubts of several stages or variants, each with all that have it."""
    places: dict[str, list[str]] = {}
    for doubt in doubts:
        place, _, reason = doubt.rpartition(": ")
        places.setdefault(reason, []).append(place)
    for reason, names in places.items():
        yield f"{', '.join(names)}: {reason}" if any(names) else reason


def _blocks(plan: PlanJson, width: int, printed: _Printed) -> Iterator[RenderableType]:
    """All parts but notes and assumptions."""
    yield _state_line(plan)
    yield from printed.new("fit, time and cost", [Text(headline(plan), style="bold")])
    if plan["model"]:
        yield from printed.new("model", [Text(_model_line(plan["model"]), style="dim")])
    yield from (Text(error, style="red") for error in _unshown_errors(plan))
    if plan["findings"]:
        findings = sorted(plan["findings"], key=lambda finding: finding["severity"])
        yield from printed.new("findings", ["", *map(_finding, findings)])
    if memory := plan["memory"]:
        yield from printed.new("memory of a device", memory_blocks(memory, width))
        for name, line in host_lines(memory):
            yield from printed.new(name, [line])
        yield from printed.new("settings near these", nearest_lines(memory))
    for name, line in job_lines(plan["memory_beside_training"]):
        yield from printed.new(name, [line])
    if plan["time"]:
        yield from printed.new("time of a step", _time(plan["time"]))
    if cost := plan["cost"]:
        yield ""
        yield from printed.new("cost of the jobs", [terms_table(cost)])
        for name, note in terms_notes(cost):
            yield from printed.new(name, [note])
        if bill := plan.get("bill"):
            yield from _bill(bill, printed)
        yield from printed.labelled(monthly_lines(cost))
    if advice := list(printed.labelled(_advice(plan))):
        yield ""
        yield from advice
    if here := plan["this_machine"]:
        yield from printed.new("machine", ["", Text(_on_this_machine(plan["jobs"], here["text"]))])
    else:
        yield from printed.new("machines", ["", machines_table(plan["jobs"], width)])
    if pipeline := plan["pipeline"]:
        yield from printed.new("pipeline steps", ["", *pipeline_steps(pipeline)])
        yield from printed.new("", [Text(LEGEND, style="dim")])


def _bill(bill: BillJson, printed: _Printed) -> Iterator[RenderableType]:
    """The bill, and for a run that deploys the places where its model could be served."""
    yield from printed.labelled(bill_lines(bill))
    if places := bill.get("places"):
        yield from printed.new("places of serving", places_blocks(places))


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


def machines_table(jobs: Mapping[str, Sequence[PoolJson]], width: int) -> Table:
    """The worker pools of each job. On a narrow screen boot disks stand below their machines."""
    is_narrow = width < COLUMNS
    table = ruled_table("job", "pool", "machines", "accelerators of each", *([] if is_narrow else ["boot disk"]))
    for job, pools in jobs.items():
        for pool in pools:
            count, disk_gb = pool["accelerator_count"], pool["boot_disk_size_gb"]
            machines = f"{pool['replica_count']} x {pool['machine_type']}"
            disk = f"{disk_gb} GB {pool['boot_disk_type']}" if disk_gb else "–"
            table.add_row(
                job,
                pool["role"],
                f"{machines}\n  {disk}" if is_narrow else machines,
                f"{count} x {pool['accelerator_type']}" if count else "–",
                *([] if is_narrow else [disk]),
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
        return f"may fit: {where}, {-spare:,.1f} GiB too much, within the error of the estimate"
    if spare >= 0 and not memory["fits"]:
        return f"does not fit: {where}, but too little of the machine's own memory"
    return (
        f"fits: {where}, {spare:,.1f} GiB spare"
        if memory["fits"]
        else f"does not fit: {where}, {-spare:,.1f} GiB too much"
    )


def _hours(time: TimeJson | None) -> str:
    if time is None:
        return f"time {UNKNOWN}"
    if time["train_hours"] is None:
        step_s = time["step_s"]
        return f"time {UNKNOWN}" if step_s is None else f"{seconds_text(step_s)} a step, training hours {UNKNOWN}"
    hours, interval = time["train_hours"], time["interval"]
    around = f" ({between(interval['low'] * hours, interval['high'] * hours)})" if interval else ""
    return f"training {hours_text(hours)}{around}"


def _price(cost: CostJson | None) -> str:
    if cost is None:
        return f"cost {UNKNOWN}"
    if cost["usd"] is None:
        train = step_of(cost, "train")
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


def _finding(finding: FindingJson) -> Grid:
    sign, style = FINDING_LOOKS["failed" if finding["severity"] == "error" else "warning"]
    table = Grid(columns=2)
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
        yield Text.assemble(("Time of a step: unknown.", "bold"), f" {_why_unknown(time)}")
        return
    facts = [f"bottleneck: {time['binds']}"]
    facts.append(f"MFU {time['mfu']:.0%}" if time["mfu"] is not None else f"MFU {UNKNOWN}")
    if time["tokens_per_s_per_gpu"] is not None:
        facts.append(f"{time['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU")
    facts.append(f"{time['steps']:,} steps" if time["steps"] is not None else f"number of steps {UNKNOWN}")
    yield Text.assemble((f"Time of a step: {seconds_text(step_s)}", "bold"), f"  {' · '.join(facts)}")
    table = ruled_table("part", "time", "share", "", right=("time", "share"))
    for part in time["parts"]:
        if part["hidden"]:
            table.add_row(Text(part["name"], style="dim"), seconds_text(part["s"]), "", Text("hidden", style="dim"))
        else:
            mark = Text("◂ bottleneck", style="bold") if part["name"] == time["binds"] else ""
            table.add_row(part["name"], seconds_text(part["s"]), share_text(part["s"] / step_s), mark)
    yield table


def _why_unknown(time: TimeJson) -> str:
    return time["assumptions"][0]


def _advice(plan: PlanJson) -> Iterator[tuple[str, str]]:
    """Resolved choices, choices that would pay, and the transport that NCCL is expected to use between nodes."""
    choices = {
        "Compiled layers": plan["compile"],
        "Feature cache": plan["features_cache"],
        "Reduction Server": plan["reduction_server"],
    }
    for name, advice in choices.items():
        if advice:
            yield name, f"{advice['state']}: {advice['why']}."
    if plugin := plan["nccl_plugin"]:
        yield "NCCL plugin", f"{plugin}."


def _remarks(*plans: PlanJson, also: Sequence[str] = (), verbose: bool) -> Iterator[RenderableType]:
    """Notes, each once, and the assumptions or their number."""
    notes, assumed = [note for plan in plans for note in plan["notes"]], [*also]
    for plan in plans:
        for part in (plan["time"], plan["cost"], plan["pipeline"]):
            assumed += part["assumptions"] if part else []
        if plan["time"] and plan["time"]["step_s"] is None:
            assumed.remove(_why_unknown(plan["time"]))  # the time of a step says it
        if plan["time"] and (interval := plan["time"]["interval"]):
            assumed.append(interval["origin"])
    notes = list(dict.fromkeys([*notes, *(line for line in assumed if line.startswith(DECISIVE))]))
    assumed = [line for line in dict.fromkeys(assumed) if line not in notes]
    yield from _listed("Notes", notes)
    if verbose:
        yield from _listed("Assumptions", assumed)
    elif assumed:
        yield Text(f"Assumptions of these figures: {len(assumed)}; --verbose lists them.", style="dim")


def _listed(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    table = Grid(columns=2)
    for line in lines:
        table.add_row(Text("·", style="dim"), Text(line, style="dim"))
    if lines:
        yield Text(title, style="dim bold")
        yield table


def _parameters(count: int) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)
