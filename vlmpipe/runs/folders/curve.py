"""A learning curve in lines for a terminal."""

from __future__ import annotations

from vlmpipe.records.learning_curve import CurvePoint, LearningCurve, percent, percents


def curve_lines(curve: LearningCurve) -> list[str]:
    """The answer, the possible gain, the shares, the check of the law, and notes."""
    answer = curve.decision + (_price(curve) if curve.answer in ("needs", "reached") else "")
    lines = [answer[0].upper() + answer[1:]]
    lines += [text for text in (f"to do: {curve.advice}" if curve.advice else "", curve.gain) if text]
    baseline = f", majority baseline {percent(curve.baseline)}" if curve.baseline is not None else ""
    lines += ["", f"{curve.metric} on {curve.questions:,} questions; intervals of 80 %{baseline}"]
    lines.append(f"{'share':>7} {'samples':>9} {'starts':>6} {'score':>8}   interval")
    lines += [_row(point) for point in curve.points]
    lines.append("")
    if (checked := curve.checked) and checked.measured is not None:
        verdict = "inside" if checked.is_inside else "outside: read the law with care"
        predicted = f"{percent(checked.score.value)} ({percents(checked.score)})"
        text = f"from the smaller shares {predicted} was predicted for the largest"
        lines.append(f"check: {text}, {percent(checked.measured)} was measured: {verdict}")
    lines += [curve.length] if curve.length else []
    return lines + [f"note: {note}" for note in curve.notes]


def _row(point: CurvePoint) -> str:
    if point.score is None:
        return f"{percent(point.share):>7} {point.samples:>9,.0f} {point.starts:>6} {'–':>8}   failed"
    what = "  at the majority baseline" if point.at_baseline else ""
    score = f"{percent(point.score.value):>8}   {percents(point.score)}"
    return f"{percent(point.share):>7} {point.samples:>9,.0f} {point.starts:>6} {score}{what}"


def _price(curve: LearningCurve) -> str:
    """Cost of one training on the needed samples: dollars by the plan's price, else time."""
    if curve.cost is None or curve.needed is None:
        return ""
    usd, hours = curve.cost.usd(curve.needed.value), curve.cost.hours(curve.needed.value)
    time = f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"
    money = "" if usd is None else f"<$0.01, {time}" if usd < 0.005 else f"${usd:,.2f}, {time}"
    return f"; training on them takes {money or time}"
