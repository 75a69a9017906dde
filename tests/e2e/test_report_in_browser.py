"""The run report and a comparison in a real browser: they ask for nothing, nothing overflows, all text can be read.

Needs a Chromium on PATH and the package playwright; screenshots go to build/report/ for people to look at.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.reports import make_run
from tests.support.runs_root import write_run
from tests.support.short_form import WHOLE
from vlmpipe.comparison.compare import compare
from vlmpipe.comparison.page import SHOWN, build_page
from vlmpipe.comparison.sides import read_sides
from vlmpipe.inventory.listing import newest_runs
from vlmpipe.inventory.page import build_page as all_runs_page
from vlmpipe.inventory.tags import change_tags
from vlmpipe.report.build import write_report
from vlmpipe.report.svg_charts import PARTS

sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENSHOTS = ROOT / "build" / "report"
NUM_PICTURES = 8 + 8 + 1 + 1  # wrong and right answers, rejected samples, accepted samples
PAGE_LINES = 25  # of the list of all answers
WIDTHS = [400, 1400]
SCHEMES = ["light", "dark"]
ONCE_EACH = list(zip(WIDTHS, SCHEMES, strict=True))
VIEWS = list(itertools.product(WIDTHS, SCHEMES)) if WHOLE else ONCE_EACH

# Every text whose contrast with what lies behind it is below 4.5, or 3 for large text (WCAG 2.2, 1.4.3 AA).
LOW_CONTRAST = """() => {
  const parse = color => {
    const parts = color.match(/[\\d.]+/g).map(Number);
    return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
  };
  const over = (top, below) => top.rgb.map((value, i) => value * top.alpha + below[i] * (1 - top.alpha));
  const behind = element => {
    if (!element) return [255, 255, 255];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own.alpha === 1 ? own.rgb : over(own, behind(element.parentElement));
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || element.closest('title') || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), back = behind(element);
    const front = over(parse(element instanceof SVGElement ? style.fill : style.color), back);
    const [high, low] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 600);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (large ? 3 : 4.5)) found.push(`${contrast.toFixed(2)}: ${text.slice(0, 40)} (${element.className})`);
  }
  return [...new Set(found)];
}"""

# Every chart text as tall as it is drawn, in CSS pixels of its font.
CHART_TEXT_PIXELS = """() => [...document.querySelectorAll('svg.chart text')].map(
  text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    return write_report(str(run))


@pytest.fixture(scope="module")
def predictions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_report_reads_well(page: sync_api.Page, report: str, width: int, scheme: str) -> None:
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"file://{report}")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{width}-{scheme}.png"), full_page=True)

    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [f"file://{report}"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    loaded = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(loaded) == NUM_PICTURES + PAGE_LINES
    assert min(loaded) > 0
    assert page.evaluate(LOW_CONTRAST) == []
    sizes = page.evaluate(CHART_TEXT_PIXELS)
    assert len(sizes) > 40
    assert min(sizes) >= 11


@pytest.fixture(scope="module")
def comparison(run: Path, predictions: list[dict[str, Any]]) -> Path:
    """The page of the run and of another one, which answers every third question otherwise."""
    other = Path(shutil.copytree(run, run.with_name("a-run-with-a-long-name-20261121-101500")))
    lines = [dict(line) for line in predictions]
    for line in lines[::3]:
        line |= {"correct": not line["correct"], "prediction": "a longer answer" if line["correct"] else line["answer"]}
    (other / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = run.with_name("comparison.html")
    path.write_text(build_page(compare(read_sides([str(run), str(other)], str(run.parent.parent)))))
    return path


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_comparison_reads_well(page: sync_api.Page, comparison: Path, width: int, scheme: str) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"file://{comparison}")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"comparison-{width}-{scheme}.png"), full_page=True)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    loaded = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(loaded) == SHOWN and min(loaded) > 0
    assert page.evaluate(LOW_CONTRAST) == []
    answers = page.evaluate("[...document.querySelectorAll('.sample dd')].map(answer => answer.clientWidth)")
    assert min(answers) > 100, "an answer is written along its line, not letter below letter"


@pytest.mark.parametrize(("width", "scheme"), ONCE_EACH)
def test_the_page_over_all_runs_reads_well(page: sync_api.Page, tmp_path: Path, width: int, scheme: str) -> None:
    for number in range(12):
        losses = tuple(3 / (step + number + 1) for step in range(60))
        settings = {"train": {"optimizer": {"learning_rate": number / 1000}, "epochs": number % 3}}
        folder = write_run(
            tmp_path,
            f"digits-20260101-00000{number}",
            started_s=number,
            exit_code=0 if number % 3 else 130,
            settings=settings,
            losses=losses,
            exact_match=number / 12 if number % 3 else None,
        )
    change_tags(folder, ["baseline", "a-tag-of-many-letters-and-no-space"])
    (folder / "report.html").write_text("<title>its report</title>")
    runs = tmp_path / "runs.html"
    runs.write_text(all_runs_page(newest_runs(str(tmp_path)), runs))
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: requests.append(request.url))
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"file://{runs}")
    page.screenshot(path=str(SCREENSHOTS / f"runs-{width}-{scheme}.png"), full_page=True)
    assert complaints == [] and requests == [f"file://{runs}"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(LOW_CONTRAST) == []
    assert min(page.evaluate(CHART_TEXT_PIXELS)) >= 11
    colours = page.evaluate("[...document.querySelectorAll('.line.own')].map(line => getComputedStyle(line).stroke)")
    assert len(set(colours[:PARTS])) == PARTS
    page.get_by_role("link", name=folder.name).click()
    assert page.title() == "its report"


def test_hovering_a_line_shows_its_point(page: sync_api.Page, report: str) -> None:
    page.goto(f"file://{report}")
    point = page.locator("svg.chart circle.hover").nth(3)
    assert point.evaluate("point => getComputedStyle(point).opacity") == "0"
    point.hover()
    assert point.evaluate("point => getComputedStyle(point).opacity") == "1"
    assert point.locator("title").text_content().startswith("step 20: ")


def test_the_configuration_opens_by_keyboard(page: sync_api.Page, report: str) -> None:
    page.goto(f"file://{report}")
    section = page.locator("details", has_text="optimizer.learning_rate")
    assert not section.locator("table").is_visible()
    section.locator("summary").focus()
    page.keyboard.press("Enter")
    assert section.locator("table").is_visible()


def test_paper_shows_the_whole_configuration_and_no_links(page: sync_api.Page, report: str) -> None:
    page.goto(f"file://{report}")
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("nav").is_visible()
    tables = page.locator("details table")
    assert tables.count() > 8
    assert all(tables.nth(number).is_visible() for number in range(tables.count()))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"


def test_all_wrong_answers_are_shown_page_by_page(
    page: sync_api.Page, report: str, predictions: list[dict[str, Any]]
) -> None:
    page.goto(f"file://{report}")
    rows, following = page.locator("#predictions tbody tr"), page.get_by_role("button", name="Next")
    seen: list[tuple[str, ...]] = []
    while True:
        assert rows.count() <= PAGE_LINES
        seen += [tuple(cells[1:]) for cells in rows.evaluate_all(CELLS)]
        if following.is_disabled():
            break
        following.click()
    wrong = [line for line in predictions if not line["correct"]]
    assert len(wrong) > PAGE_LINES
    assert sorted(seen) == sorted(
        ("✕ wrong", line["slice"], line["question"].replace("<image>", "").strip(), line["answer"], line["prediction"])
        for line in wrong
    )


def test_answers_are_filtered_by_text_and_verdict_and_downloaded(
    page: sync_api.Page, report: str, predictions: list[dict[str, Any]]
) -> None:
    page.goto(f"file://{report}")
    page.get_by_label("Show").select_option("right")
    page.get_by_label("Text").fill("LEFT digit even")
    expected = [line for line in predictions if line["correct"] and "left digit even" in line["question"].lower()]
    assert page.locator("#predictions output").text_content().startswith(f"{len(expected)} of {len(predictions)} ")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    found = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert sorted(line["id"] for line in found) == sorted(line["id"] for line in expected)
    assert {line["correct"] for line in found} == {True}
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert [line["id"] for line in table] == [line["id"] for line in found]
    assert download.value.suggested_filename.endswith("-predictions.csv")


HOSTILE = "</pre></script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"


def test_answers_run_neither_as_markup_nor_as_formulas(page: sync_api.Page, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    line = {
        "id": "=1+1",
        "slice": HOSTILE,
        "question": HOSTILE,
        "answer": "-5",
        "prediction": '@x,"y"',
        "correct": False,
    }
    (run / "predictions.jsonl").write_text(json.dumps(line))
    page.goto(f"file://{write_report(str(run))}")
    assert page.locator("#predictions tbody td").nth(3).text_content() == HOSTILE
    assert page.evaluate("window.hit") is None
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    (found,) = csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8")))
    assert (found["id"], found["answer"], found["prediction"]) == ("'=1+1", "-5", '\'@x,"y"')


def test_a_script_that_got_into_the_page_would_not_run(page: sync_api.Page, report: str, tmp_path: Path) -> None:
    changed = tmp_path / "report.html"
    changed.write_text(
        Path(report).read_text(encoding="utf-8").replace("<main>", "<main><script>window.hit = 1</script>")
    )
    page.goto(f"file://{changed}")
    assert page.evaluate("window.hit") is None
    assert page.locator("#predictions").is_visible(), "the page's own script does"


def test_without_javascript_the_page_says_where_all_answers_are(browser: sync_api.Browser, report: str) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"file://{report}")
    assert not page.locator("#predictions").is_visible()
    assert page.locator("noscript p").inner_text().endswith("/predictions.jsonl has all answers.")
    page.close()
