"""`vlmpipe gate`: what the gate of a run file can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, load
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.registry.acceptance import GateRates


def gate(
    config: RunFile,
    overrides: Overrides = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Validation questions instead of the run file's.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how often the gate accepts. A model as good as the champion, better or worse; starts nothing."""
    settings = load(config, overrides)
    if settings.sweep:
        raise ConfigError("a sweep has no gate", expected="a run file of one model", fix="leave the section sweep out")
    last = list(settings.stage_runs().values())[-1]
    with doing(f"counting the questions of {config}"):
        count, origin = (questions, "as --questions says") if questions else _questions(last)
    from vlmpipe.registry.acceptance import gate_rates

    rates = gate_rates(last.gate, count)
    if as_json:
        print_json({"origin": origin, "bounds": last.gate.bounds, **rates.as_json()})
    else:
        print_lines(_lines(last, rates, origin))


def _questions(config: RunConfig) -> tuple[int, str]:
    """Validation questions, at one a sample. Raises ConfigError where the run file does not say how many."""
    from vlmpipe.planner.jobs.hours import validation_samples
    from vlmpipe.planner.plan import plan_basis

    most = config.evaluate.max_samples
    samples = None if config.train.trainer else validation_samples(config, plan_basis(config)[1])
    if not samples and not most:
        raise ConfigError(
            "the number of validation questions is not known",
            expected="prepared data, plan.samples, evaluate.max_samples or --questions",
            fix="for example vlmpipe gate CONFIG --questions 1000",
        )
    if most and (not samples or most < samples):
        return most, "evaluate.max_samples, taken as one question each"
    assert samples
    return samples, "validation samples of the plan, taken as one question each"


def _lines(config: RunConfig, rates: GateRates, origin: str) -> list[str]:
    gate = config.gate
    lines = [f"questions   {rates.questions:,} ({origin})"]
    if gate.bounds == "none":
        return [*lines, "gate        none: every model is accepted"]
    if rates.questions < rates.min_questions:
        lines.append(f"            fewer than gate.min_questions, {rates.min_questions}: no model is accepted")
    if rates.margin is None:
        return [*lines, "champion    not compared: gate.max_regression is null"]
    how = "gate.max_regression: auto" if rates.is_auto else "gate.max_regression"
    lines += [
        f"margin      a drop of {100 * rates.margin:.2f} points must be ruled out ({how})",
        "",
        "How often the comparison with the champion accepts, by the model's true difference from it:",
        "",
    ]
    shares = list(rates.accepted)
    lines.append("difference   " + "".join(f"{f'{share:.0%} differ':>12}" for share in shares))
    for difference in rates.accepted[shares[0]]:
        cells = [_percent(rates.accepted[share][difference]) for share in shares]
        lines.append(f"{100 * difference:+5.0f} points " + "".join(f"{cell:>12}" for cell in cells))
    lines += [
        "",
        "N % differ: the share of questions that just one of the two models answers right. Questions about one image "
        "count for less than this table assumes. Other bounds of the gate come on top.",
    ]
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
