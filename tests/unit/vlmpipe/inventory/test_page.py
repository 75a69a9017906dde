"""The page over all runs: links, curves, what differs, and no secret."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs_root import write_run
from vlmpipe.inventory.listing import newest_runs
from vlmpipe.inventory.page import build_page
from vlmpipe.inventory.tags import change_tags
from vlmpipe.report.svg_charts import PARTS


def test_the_page_shows_curves_tags_and_differing_settings(tmp_path: Path) -> None:
    for number in range(PARTS + 2):
        settings = {"train": {"epochs": number, "seed": 1}, "kubeflow": {"secret_env": {"A": {"name": str(number)}}}}
        losses = (3.0, 2.0, 1.0 + number)
        folder = write_run(
            tmp_path, f"r{number}", started_s=number, settings=settings, losses=losses, exact_match=number / 10
        )
    change_tags(folder, ["<b>best"[3:]])
    (folder / "report.html").write_text("")
    write_run(tmp_path, "other", name="llava", exit_code=None)
    html = build_page(newest_runs(str(tmp_path)), tmp_path / "build/all.html")
    assert f"Curves of the newest {PARTS} of {PARTS + 2} runs" in html
    assert html.count('class="line own"') == PARTS + 1, "a line for each, and one of their scores"
    assert f'<a href="../runs/{folder.name}/report.html">{folder.name}</a>' in html and ">best<" in html
    assert "train.epochs" in html and "train.seed" not in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")


def test_names_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, "r1", name="<script>alert(1)</script>")
    assert "<script" not in build_page(newest_runs(str(tmp_path)), tmp_path / "page.html")
