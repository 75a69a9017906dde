"""Slices by fields in the report: sorted by cost, with real images of wrong answers, and with texts that stay texts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.reports import make_run
from vlmpipe.report.build import build_report
from vlmpipe.trainer.evaluation.metrics import Prediction
from vlmpipe.trainer.evaluation.validation.field_slices import field_slices

HOSTILE = "<img src=x onerror=alert(1)>"


def test_values_are_listed_by_their_share_of_the_errors_with_images(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    wrong = [number for number, line in enumerate(lines) if not line["correct"]]
    assert len(wrong) > 12
    costly = set(wrong[3:])
    for number, line in enumerate(lines):
        line["fields"] = {"camera": HOSTILE if number in costly else "front", "lux": str(number)}
    predictions = [
        Prediction(line["id"], line["turn"], line["slice"], "", "", "", line["correct"], "", line["id"],
                   tuple(line["fields"].items()))
        for line in lines
    ]  # fmt: skip
    evaluation = json.loads((run / "evaluate.json").read_text())
    by_field = {
        name: found.model_dump() for name, found in field_slices(["camera", "lens", "lux"], predictions).items()
    }
    (run / "evaluate.json").write_text(json.dumps(evaluation | {"by_field": by_field}))
    (run / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = build_report(str(run))
    section = page[page.index("By field: what costs most") : page.index('id="samples"')]
    assert HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;" in section
    assert section.index("&lt;img src=x") < section.index(">front<"), "the largest share of the errors first"
    assert f"{100 * len(costly) / len(wrong):.1f}%" in section
    assert (
        f"10 of {len(costly)} wrong answers" in section and f"3 of {len(wrong) - len(costly)} wrong answers" in section
    )
    assert section.count("data:image/") >= 13
    ranges = [part for part in field_slices(["lux"], predictions)["lux"].slices if part.errors]
    assert ranges
    for part in ranges:
        assert f"lux: {part.value}, {min(10, part.errors)} of {part.errors} wrong answers" in section
    assert f"Lux of data.slices has {len(lines)} values: its numbers are shown in 4 ranges" in page
    assert "Lens of data.slices gives no slices" in page
