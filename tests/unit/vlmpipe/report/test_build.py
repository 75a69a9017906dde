"""The run report: self-contained, well-formed, safe with hostile text, tolerant of whatever a run left undone."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import seal
from tests.support.report_page import Page
from tests.support.reports import edit, make_run, write_json
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.registry.model_card import model_card
from vlmpipe.report.build import build_report, write_report
from vlmpipe.report.load import duration
from vlmpipe.runs.folders.summary import evaluation_lines
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.evaluation_notes import evaluation_notes
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage.local import LocalStorage

SECTIONS = ["decision", "training", "slices", "samples", "steps", "plan", "data", "configuration", "environment"]
RUN_FILES = [
    "run.json", "metrics.jsonl", "summary.json", "evaluate.json", "predictions.jsonl", "decision.json", "prepared.json",
    "registered.json", "plan.json",
]  # fmt: skip


def test_benchmarks_are_a_section_of_their_own(run: Path) -> None:
    assert 'id="benchmarks"' not in build_report(str(run))
    described = {"format": "pope", "questions": 3000, "scores": {"f1": 0.5}, "intervals": {"f1": [0.4, 0.6125]}}
    edit(run / "evaluate.json", benchmarks={"pope-random": described, "broken": {"scores": {"f1": None}}})
    page = Page(build_report(str(run)))
    assert "benchmarks" in page.attributes("section", "id")
    for text in ("pope-random", "3,000", "0.500", "0.400 to 0.61", "not measured"):
        assert text in page.text


def test_pairs_that_look_alike_are_shown_as_pictures(run: Path, tmp_path: Path) -> None:
    evaluation = json.loads((run / "evaluate.json").read_text(encoding="utf-8"))
    pair = {"image": "val/1.jpg", "picture": "benchmarks/pope-0.png", "train": ["gone", 0], "distance": 12}
    pope = {"format": "pope", "questions": 9, "scores": {}, "intervals": {}, "pairs_like_train": [pair]}
    write_json(run / "evaluate.json", evaluation | {"benchmarks": {"pope": pope}})
    pointers = json.loads((run / "prepared.json").read_text())
    prepared = Path(shutil.copytree(pointers["prepared_uri"], tmp_path / "prepared"))  # other tests share it
    write_json(run / "prepared.json", pointers | {"prepared_uri": str(prepared)})
    stats = json.loads((prepared / "stats.json").read_text())
    identity = Index.load(str(prepared)).split("eval").ids[0]
    near = {"eval_images": 1, "pairs": [{"eval": [identity, 0], "train": ["also gone", 0], "distance": 3}]}
    write_json(prepared / "stats.json", stats | {"near_duplicates": near})
    seal(prepared)
    page = build_report(str(run))
    assert "1 validation images look like images of the training split" in page
    assert "The 2 closest pairs" in page and "val/1.jpg" in page and "12 of 256 bits differ" in page
    assert page.count('alt="Scored image of pair') == 1, "a picture that is gone is a sentence"
    assert "This sample is not in the prepared data any more." in page


def test_a_finished_run_shows_every_section_with_its_numbers(finished: Path) -> None:
    page = Page(build_report(str(finished)))
    assert [name for name in page.attributes("section", "id") if name in SECTIONS] == SECTIONS
    evaluation = json.loads((finished / "evaluate.json").read_text())
    for share in (evaluation["exact_match"], evaluation["chance"], evaluation["controls"]["no_image"]["exact_match"]):
        assert f"{100 * share:.1f}%" in page.text
    assert len(page.attributes("svg", "aria-label")) == 5
    assert len(page.attributes("img", "src")) == 16 + 2  # a rejected sample, and one of the contact sheet
    named = ("digits version 4", "image.truncated", "optimizer.learning_rate", "0a1b2c3d", "1,200 new", "95 of 100")
    assert [name for name in named if name not in page.text] == []
    assert "There is no" not in page.text


def test_the_page_is_self_contained_and_names_what_it_draws(finished: Path) -> None:
    html = build_report(str(finished))
    page = Page(html)
    assert not re.search(r"https?://", html)
    assert all(source.startswith("data:image/") for source in page.attributes("img", "src"))
    assert all(target.startswith("#") for target in page.attributes("a", "href"))
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "object", "embed"}
    assert "url(" not in html
    (script,) = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.attributes("meta", "content")[1]
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    anchors = {target[1:] for target in page.attributes("a", "href")}
    assert anchors <= {str(attributes["id"]) for _, attributes in page.elements if "id" in attributes}
    assert all(alt for alt in page.attributes("img", "alt"))
    assert len(page.attributes("img", "alt")) == len(page.attributes("img", "src"))
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.elements if tag == "th")


def test_a_profile_is_a_timeline_with_its_operations(finished: Path) -> None:
    page = build_report(str(finished))
    section = page.partition("Profile: Rank 1 on node 0, steps 20 to 21")[2].partition("</section>")[0]
    assert section.count('<rect class="bar"') == 5
    for text in ("communication: 0.15 s", "gloo:all_reduce", "aten::mm", "rank-1.pt.trace.json.gz", "12.0%"):
        assert text in section


@pytest.mark.parametrize("value", [None, "x", -1, [["a", 2]], {"computing": [[1], [None, 2]]}])
@pytest.mark.parametrize("field", ["seconds", "spans", "operations", "collectives", "exposed_communication_s"])
def test_a_profile_of_another_form_never_breaks_the_report(run: Path, field: str, value: Any) -> None:
    path = run / "profile/rank-1.json"
    write_json(path, json.loads(path.read_text()) | {field: value})
    assert "Training report" in build_report(str(run))


def test_losses_by_source_have_charts_of_their_own_behind_the_whole(run: Path) -> None:
    """A line has a source only if it was trained since the line before."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate(lines):
        line |= {"loss/dogs": 2.0} | ({"loss/cats": 3.0} if number % 2 else {})
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    page = Page(build_report(str(run)))
    charts = [label.partition(",")[0] for label in page.attributes("svg", "aria-label")]
    assert charts[:3] == ["Loss", "Loss: dogs", "Loss: cats"]
    assert "no finite value" not in page.text


def test_earlier_stages_have_a_section_and_a_report_of_their_own(run: Path) -> None:
    for name, began_s in (("warm-up", 1.0), ("align", 2.0)):
        shutil.copytree(run, run / "stages" / name, ignore=shutil.ignore_patterns("stages"))
        edit(run / "stages" / name / "steps/resolve-run.json", started_s=began_s)
    edit(run / "stages/align/evaluate.json", exact_match=0.125, loss=3.25)
    edit(run / "stages/align/decision.json", reason="Accepted: loss 3.25 is below 6.")
    edit(run / "stages/align/plan.json", time={"steps": 150, "train_hours": 0.5}, cost={"usd": 12.5})
    write_report(str(run))
    page = Page((run / "report.html").read_text())
    assert page.attributes("section", "id")[0] == "stages"
    links = [target for target in page.attributes("a", "href") if not target.startswith("#")]
    assert links == ["stages/warm-up/report.html", "stages/align/report.html"]
    assert all((run / link).is_file() for link in links)
    for text in ("Loss 3.25 is below 6.", "150", "30 min 0 s", "$12.50", "3.250", "12.5%"):
        assert text in page.text, text
    charts = page.attributes("svg", "aria-label")
    assert sum(label.startswith("Loss") for label in charts) == 3
    of_stage = Page((run / "stages/align/report.html").read_text())
    assert "stages" not in of_stage.attributes("section", "id")


def test_a_run_that_a_stage_ended_says_so_and_leaves_out_what_it_did_not_reach(run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(run, whole / "stages/align")
    edit(whole / "stages/align/decision.json", accepted=False, reason="Rejected: loss 7 is above 6.")
    write_json(whole / "steps/notify.json", {"step": "notify", "state": "running", "started_s": 9.0})
    page = Page(build_report(str(whole)))
    assert "Rejected in stage align" in page.text and "Loss 7 is above 6." in page.text
    assert not {"decision", "training", "samples"} & set(page.attributes("section", "id"))


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></style></title>{{ 7 * 7 }}&amp;\u202e"


def test_hostile_text_stays_text(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"question": HOSTILE, "answer": HOSTILE + "a", "prediction": HOSTILE, "slice": HOSTILE}
    (run / "predictions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    edit(run / "evaluate.json", slices={HOSTILE: {"questions": 3, "exact_match": 0.5, "chance": 0.1}})
    edit(run / "run.json", name=HOSTILE, data={HOSTILE: HOSTILE})
    edit(run / "decision.json", reason=HOSTILE)
    edit(run / "registered.json", model=HOSTILE)
    edit(run / "summary.json", strategy=HOSTILE, versions={HOSTILE: HOSTILE})
    edit(run / "steps" / "train.json", message=HOSTILE)
    html = build_report(str(run))
    page = Page(html)
    assert html.count("<script") == 1, "the page's own"
    assert not {tag for tag, _ in page.elements} & {"iframe"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert all(source.startswith("data:") for source in page.attributes("img", "src"))
    assert page.text.count("<script>alert(1)</script>") >= 16
    assert "{{ 7 * 7 }}" in page.text


def listed(html: str) -> dict[str, Any]:
    """What the page's script lists."""
    content: dict[str, Any] = json.loads(unescape(html.partition("<pre hidden>")[2].partition("</pre>")[0]))
    return content


def test_all_answers_are_listed_wrong_ones_first_with_pictures(finished: Path) -> None:
    predictions = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    found = listed(build_report(str(finished)))
    assert found["fields"] == ["correct", "slice", "question", "answer", "prediction", "id"]
    expected = [[line[field] for field in found["fields"]] for line in predictions]
    for line in expected:
        line[2] = line[2].replace("<image>", "").strip()
    assert sorted(line[:-1] for line in found["lines"]) == sorted(expected)
    verdicts = [line[0] for line in found["lines"]]
    assert verdicts == sorted(verdicts) and not verdicts[0]
    with_picture = [line[-1] is not None for line in found["lines"]]
    assert all(with_picture[:100]) and len(found["images"]) == 100


def test_a_long_list_of_answers_is_cut_with_a_note(run: Path) -> None:
    lines = [
        {"id": f"s{number}", "slice": "x", "question": "?", "answer": "a" * 3000, "prediction": "b" * 3000,
         "correct": number % 2 == 0}
        for number in range(10_000)
    ]  # fmt: skip
    (run / "predictions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    html = build_report(str(run))
    found = listed(html)["lines"]
    assert len(html) < 6_000_000
    assert [line[0] for line in found] == [False] * len(found) and 3000 < len(found) < 5000
    assert {len(line[3]) for line in found} == {501}
    assert (
        f"{10_000 - len(found):,} answers are left out to keep this page small. Long texts are cut." in Page(html).text
    )


def test_the_tensorboard_command_is_named(run: Path) -> None:
    assert f"tensorboard --logdir {run}/logs" in Page(build_report(str(run))).text


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("damage", ["missing", "cut off", "of another kind"])
def test_a_missing_or_damaged_file_becomes_a_sentence(run: Path, name: str, damage: str) -> None:
    path = run / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_text('{"step": 1, "a' if damage == "cut off" else "[1, 2]")
    page = Page(build_report(str(run)))
    left_out = damage == "missing" and name in ("registered.json", "plan.json")  # not every run has them
    wanted = [section for section in SECTIONS if not (left_out and name == f"{section}.json")]
    assert [found for found in page.attributes("section", "id") if found in SECTIONS] == wanted
    if not left_out:
        assert name in page.text


def test_half_a_line_of_metrics_costs_only_that_line(whole_run: Path) -> None:
    with (whole_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 405, "lo')
    page = Page(build_report(str(whole_run)))
    assert "1 of 81 lines of metrics.jsonl cannot be read" in page.text
    assert len(page.attributes("svg", "aria-label")) == 5


def test_a_loss_that_is_not_a_number_is_counted_not_drawn(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 405, "loss": NaN}\n{"step": 410, "loss": Infinity}\n')
    html = build_report(str(run))
    assert "2 logged steps have no finite value." in Page(html).text
    assert "nan" not in re.findall(r'points="([^"]*)"', html)[0]


def test_a_failed_run_shows_the_failed_step_and_its_error(run: Path) -> None:
    for name in RUN_FILES[1:]:
        (run / name).unlink()
    for step in ("sync-checkpoint", "evaluate", "decide", "register-model"):
        (run / "steps" / f"{step}.json").unlink()
    edit(run / "steps" / "train.json", state="failed", message="no space left while writing checkpoints")
    page = Page(build_report(str(run)))
    assert "Failed in step train" in page.text
    assert "no space left while writing checkpoints" in page.text
    assert "There is no evaluate.json" not in page.text, "what was not reached is not shown"


WHY = {
    "cause": "the disk is full: <b>/data</b>",
    "seen": {"where": "logs/train/workerpool0-0.log", "line": 7, "text": "No space left on device"},
    "also": ["rank 1 was ended by the launcher"],
    "remedy": "give cluster.boot_disk_size_gb more",
    "command": "vlmpipe run digits.yaml",
}


def test_a_failed_run_shows_its_diagnosis_and_a_run_that_went_on_does_not(run: Path) -> None:
    write_json(run / "diagnosis.json", WHY)
    assert "the disk is full" not in Page(build_report(str(run))).text, "the run was continued and ended"
    edit(run / "steps" / "train.json", state="failed", message="no space left while writing checkpoints")
    text = Page(build_report(str(run))).text
    assert "Cause the disk is full: <b>/data</b> Seen in logs/train/workerpool0-0.log, line 7: No space left" in text
    assert "To do give cluster.boot_disk_size_gb more Continue vlmpipe run digits.yaml" in text


def test_a_stopped_run_is_shown_as_stopped_whatever_an_earlier_attempt_left(run: Path) -> None:
    (run / "decision.json").unlink()
    edit(run / "steps" / "evaluate.json", state="failed", message="of an earlier attempt", started_s=1.0)
    edit(run / "steps" / "train.json", state="stopped", message="stopped on request after step 7")
    page = Page(build_report(str(run)))
    assert "Stopped in step train" in page.text
    assert "Stopped on request after step 7. Run it again to continue." in page.text
    assert "of an earlier attempt" not in page.text


def test_a_run_that_failed_before_training_has_no_empty_sections(run: Path) -> None:
    edit(
        run / "steps" / "prepare-data.json", state="failed", message="9 of 100 samples cannot be used: image.animated 9"
    )
    left = ("metrics.jsonl", "summary.json", "evaluate.json", "predictions.jsonl", "decision.json", "registered.json")
    for name in left:
        (run / name).unlink(missing_ok=True)
    page = Page(build_report(str(run)))
    assert [name for name in page.attributes("section", "id") if name in SECTIONS] == SECTIONS[4:]
    assert not {f"#{name}" for name in SECTIONS[:4]} & set(page.attributes("a", "href"))


def test_a_rejected_run_shows_the_failed_checks(run: Path) -> None:
    (run / "registered.json").unlink()
    decision = json.loads((run / "decision.json").read_text())
    decision["checks"][0] |= {"passed": False, "value": None, "why": "exact_match is nan, not a finite number"}
    edit(run / "decision.json", accepted=False, reason="Rejected: too low.", checks=decision["checks"])
    page = Page(build_report(str(run)))
    assert "Rejected Too low." in page.text
    assert "4 of 5 checks passed" in page.text
    assert "✕ failed" in page.text


def test_a_run_that_is_under_way_is_not_finished(run: Path) -> None:
    (run / "decision.json").unlink()
    edit(run / "steps" / "evaluate.json", state="running", ended_s=0.0)
    (run / "steps" / "notify.json").unlink()
    page = Page(build_report(str(run)))
    assert "Not finished" in page.text
    assert "The step evaluate has begun." in page.text


@pytest.mark.parametrize("broken", ["index.arrow", "shards/eval-000000.tar", "shards/eval-000000.json"])
def test_pictures_that_cannot_be_read_are_replaced_by_a_reason(tmp_path: Path, broken: str) -> None:
    run = make_run(tmp_path)
    path = tmp_path / "prepared" / "f3a9c1d2" / broken
    path.write_bytes(path.read_bytes()[:-700] if path.stat().st_size > 2000 else b"{")
    page = Page(build_report(str(run)))
    assert "cannot be read" in page.text
    assert len(page.attributes("img", "src")) < 16
    assert "Which digit is on the left?" in page.text


def test_without_any_run_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        build_report(str(tmp_path / "nothing"))


def test_the_report_is_written_into_the_run(run: Path) -> None:
    assert write_report(str(run)) == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_what_the_scores_stand_on_is_said_on_page_screen_and_card_alike(run: Path) -> None:
    limits = {"cut_answers": 3, "max_new_tokens": 16, "questions_after_turns": 20, "images": 9, "images_like_train": 1}
    edit(
        run / "evaluate.json", **limits, benchmarks={"captions": {"scores": {}, "cut_answers": 4, "max_new_tokens": 8}}
    )
    evaluation = Evaluation.read(LocalStorage(run))
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "r", "root_uri": "/runs"}})
    screen, card = "\n".join(evaluation_lines(evaluation)), model_card(job, evaluation, Summary(), model="m")
    notes = evaluation_notes(evaluation)
    assert len(notes) == 4
    for page in (build_report(str(run)), screen, card):
        assert [note[1:] in unescape(page).replace("\\", "") for note in notes] == [True] * 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (3599.6, "1 h 0 min"), (math.nan, "")],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text
