"""A month of serving at each place, on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.records.plan_json import ServingPlacesJson


def places_blocks(places: ServingPlacesJson) -> Iterator[RenderableType]:
    """The cheapest place, the months side by side, and costs left out."""
    changes = places["changes"]
    if changes:
        yield Text(_sentence(places), style="bold")
    columns = [f"{questions:,} a day" for questions in places["questions_a_day"]]
    table = ruled_table("a month of serving", *columns, right=columns)
    for place in places["places"]:
        cells = zip(place["usd_per_month"], place["replicas"], places["cheapest"], strict=True)
        row = [_cell(usd, replicas, is_cheapest=name == place["name"]) for usd, replicas, name in cells]
        table.add_row(f"{place['name']} ({place['machine']})", *row)
    yield table
    yield Text(" ".join(_notes(places)), style="dim")


def _sentence(places: ServingPlacesJson) -> str:
    first, *later = places["changes"]
    if not later:
        return f"{first['name']} costs least at any number of questions a day."
    ends = [f"{change['questions_a_day']:,.0f}" for change in later]
    parts = [f"{first['name']} costs least up to {ends[0]} questions a day"]
    parts += [f"{change['name']} from {end} on" for change, end in zip(later, ends, strict=True)]
    return f"{', '.join(parts)}."


def _cell(usd: float | None, replicas: int, *, is_cheapest: bool) -> Text:
    text = UNKNOWN if usd is None else amount(usd) + (f" for {replicas:,}" if replicas > 1 else "")
    return Text(text, style="bold" if is_cheapest else "")


def _notes(places: ServingPlacesJson) -> Iterator[str]:
    yield "Questions come at random moments; starts, of unknown length, are not in it."
    seconds = places["question_s"]
    if seconds is None:
        yield "How many questions a replica answers is not known: one is counted."
    else:
        yield f"A question takes {seconds:.2g} s of a replica, by the estimate of evaluation, with the longest answer."
    if usd := places["starts_on_cloud_run_usd"]:
        yield f"A single question costs {amount(usd)} on Cloud Run, as its instance idles afterwards."
    missing = dict.fromkeys(name for place in places["places"] for name in place["missing"])
    if missing:
        yield f"No price is known for: {'; '.join(missing)}."
