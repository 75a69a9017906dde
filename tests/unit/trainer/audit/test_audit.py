"""Planted faults are found in prepared data without a run, and what needs a run is said."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from tests.support.data.prepared import conversation, job_config, run_prepare, write_json
from vlmpipe.audit.page import build_page
from vlmpipe.audit.screen import lines
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.catalogue import TURN, Catalogue, PreparedSamples, read_catalogue
from vlmpipe.trainer.audit.contradictions import contradictions
from vlmpipe.trainer.audit.findings import Audit, Flagged, by_records, collected, exclusion_file
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors, image_vectors
from vlmpipe.trainer.audit.images.neighbours import Vectors, as_directions
from vlmpipe.trainer.audit.images.search import INDEX_PACKAGE
from vlmpipe.trainer.audit.label_suspects import CheckedAnswers, suspected_labels
from vlmpipe.trainer.audit.sample_losses import NEEDS_RUN
from vlmpipe.trainer.audit.text_alone import predicted_by_text
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.near_duplicates.signature import SIGNATURE_BYTES

SAMPLES, SHARED = 60, 24
KINDS = ("JPEG", "WEBP", "small", "cropped", "bright")
QUESTION, LONG = "<image>\nWhich colour?", "A very long answer. " * 8


@dataclass(frozen=True)
class Audited:
    job: JobConfig
    uri: str
    audit: Audit
    catalogue: Catalogue


def scene(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 200, (5, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def copy(kind: str, image: Image.Image) -> bytes:
    changed = {
        "small": lambda: image.resize((52, 52)),
        "cropped": lambda: image.crop((2, 2, 62, 62)),
        "bright": lambda: ImageEnhance.Brightness(image).enhance(1.15),
    }.get(kind, lambda: image)()
    buffer = io.BytesIO()
    changed.save(buffer, kind if kind in ("JPEG", "WEBP") else "PNG", quality=70)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Of 60 images five have a copy: two with the same text, one in the other split, two with another answer."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "images").mkdir()
    lines = []

    def add(name: str, data: bytes, question: str, answer: str, split: str = "train") -> None:
        (folder / "images" / f"{name}.png").write_bytes(data)
        talk = conversation(question, answer)
        lines.append({"id": name, "image": f"{name}.png", "conversations": talk, "split": split})

    for number in range(SAMPLES):
        colour = "red" if number % 2 else "blue"
        split = "eval" if number in (2, *range(50, 60)) else "train"
        answer = {40: LONG, 41: "синий"}.get(number, colour)
        add(f"sample-{number}", copy("PNG", scene(number)), QUESTION, answer, split)
    for number, kind in enumerate(KINDS):
        answer = "red" if number % 2 else "blue"
        add(f"copy-{number}", copy(kind, scene(number)), QUESTION, "green" if number > 2 else answer)
    for number in range(SHARED):
        add(f"logo-{number}", copy("PNG", scene(999)), f"<image>\nWhat of {number}?", "A logo.")
    blank = io.BytesIO()
    Image.new("RGB", (64, 64), (250, 250, 250)).save(blank, "PNG")
    add("blank", blank.getvalue(), QUESTION, "red")
    source = write_json(folder / "a.json", lines)
    job = job_config(folder / "root", source=str(source), image_folder=str(folder / "images"), max_split_error=1.0)
    uri = run_prepare(job).uri
    return Audited(job, uri, *audit(AuditRequest(job, uri, has_run=False)))


def ids(audited: Audited, kind: str, *, excluded: bool = False) -> set[str]:
    finding = audited.audit.finding(kind)  # type: ignore[arg-type]
    return {one.id for one in finding.flagged if one.is_excluded or not excluded}


def test_every_planted_copy_is_found_and_no_other(audited: Audited) -> None:
    planted = {f"{name}-{number}" for name in ("sample", "copy") for number in range(len(KINDS))}
    assert ids(audited, "near_duplicate") == planted
    finding = audited.audit.finding("near_duplicate")
    assert (finding.groups, finding.across_splits) == (len(KINDS), 1)
    # Of equal text the first by id is kept, and of both splits that of the validation split.
    assert ids(audited, "near_duplicate", excluded=True) == {"sample-0", "sample-1", "copy-2"}


def test_images_above_the_limit_are_counted_and_what_to_do_is_said(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, INDEX_PACKAGE, None)
    monkeypatch.setattr("vlmpipe.trainer.audit.images.search.MAX_EXACT", 50)
    found, _ = audit(AuditRequest(audited.job, audited.uri, has_run=False))
    images = audited.audit.images
    finding = found.finding("near_duplicate")
    assert (finding.checked, images) == (50, 67)
    told = " ".join(" ".join(lines(found, {})).split())
    assert (
        "near duplicates: 17 of 67 images were not compared: 50 are at most; pip install 'vlmpipe[large-audit]'" in told
    )
    assert "for up to 4,194,304, or audit run files with a part of" in told
    assert "answers were compared with no others" in told
    monkeypatch.delitem(sys.modules, INDEX_PACKAGE)
    pytest.importorskip(INDEX_PACKAGE, reason="the extra large-audit is not installed")
    found, _ = audit(AuditRequest(audited.job, audited.uri, has_run=False))
    finding, told = found.finding("near_duplicate"), " ".join(" ".join(lines(found, {})).split())
    assert (finding.checked, finding.obstacle) == (images, "") and "by an index" in told
    assert {flag.id for flag in finding.flagged} == ids(audited, "near_duplicate")


def test_contradictions_shared_blank_and_unusual_samples_are_found(audited: Audited) -> None:
    assert ids(audited, "contradiction", excluded=True) == {"sample-3", "copy-3", "sample-4", "copy-4"}
    assert audited.audit.finding("shared_image").samples == SHARED
    assert not ids(audited, "shared_image", excluded=True)
    assert ids(audited, "blank_image", excluded=True) == {"blank"}
    assert ids(audited, "outlier") == {"sample-40", "sample-41"}


def test_what_needs_a_run_is_said(audited: Audited) -> None:
    text_alone, suspects = (audited.audit.finding(kind) for kind in ("text_alone", "suspected_label"))
    assert (text_alone.checked, text_alone.obstacle) == (0, NEEDS_RUN)
    assert suspects.obstacle.startswith(f"by losses: {NEEDS_RUN}") and not suspects.flagged
    assert "neighbours' labels judged 0 of" in suspects.obstacle


def test_the_list_is_one_that_a_run_file_takes(audited: Audited, tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_bytes(exclusion_file(audited.audit))
    listed = read_exclusions(str(tmp_path / "list.jsonl")).ids
    assert len(listed) == audited.audit.excluded == 8
    data = audited.job.data.model_copy(update={"exclude": str(tmp_path / "list.jsonl")})
    prepared = run_prepare(audited.job.model_copy(update={"data": data}))
    assert "data.exclude leaves out 8 samples of 8 ids" in prepared.notes


def losses(audited: Audited, late: dict[str, float], early: float = 2.5, usual: float = 0.05) -> CheckedAnswers:
    turns = audited.catalogue.turns
    names = [audited.catalogue.id_of(int(sample)) for sample in turns["sample"]]
    last = np.array([late.get(name, usual) for name in names], np.float32)
    first = np.array([early if name in late else 0.6 for name in names], np.float32)
    nats = np.stack([first, last])
    return CheckedAnswers(np.arange(len(turns)), nats, (nats > 0.69).astype(np.int32), (10, 100))


def test_a_loss_that_stays_high_among_learned_neighbours_is_a_suspect(audited: Audited) -> None:
    vectors = image_vectors(audited.catalogue, audited.uri, None)
    checked = losses(audited, {"sample-7": 4.0, "sample-8": 0.01})
    finding = suspected_labels(audited.catalogue, vectors, checked, "")
    assert [one.id for one in finding.flagged] == ["sample-7"]
    assert "2.5 at step 10, 4.0 at step 100" in finding.flagged[0].detail


def test_a_label_that_no_near_image_has_is_a_suspect_where_near_images_agree() -> None:
    colours = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    drawn = np.random.default_rng(0).normal(0, 0.05, colours.shape).astype(np.float32)
    turns = np.zeros(60, TURN)
    turns["sample"], turns["question"] = np.arange(60), 7
    turns["answer"] = np.repeat([1, 2, 3], 20)
    turns["answer"][[5, 45]] = 2
    vectors = vectors_of(as_directions(colours + drawn))
    finding = suspected_labels(of_turns(turns), vectors, None, "")
    assert {one.id for one in finding.flagged} == {"5", "45"}
    assert "of the 8 nearest images with this question have one other answer, 0% this one" in finding.flagged[0].detail
    turns["answer"] = np.arange(60) % 3 + 1  # near images no longer agree
    assert not suspected_labels(of_turns(turns), vectors, None, "").flagged


def test_a_later_turn_is_compared_by_its_own_question(tmp_path: Path) -> None:
    talk = [*conversation(QUESTION, "red"), *conversation("And its shape?", "round")]
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(12):
        (tmp_path / "images" / f"{number}.png").write_bytes(copy("PNG", scene(200 + number)))
        lines.append({"id": f"a{number}", "image": f"{number}.png", "conversations": talk})
    source = write_json(tmp_path / "a.json", lines)
    job = job_config(tmp_path / "root", source=str(source), image_folder=str(tmp_path / "images"), max_split_error=1.0)
    catalogue = read_catalogue(run_prepare(job).uri, lambda *_: None)
    assert (catalogue.turns["question"] != 0).all() and len(set(catalogue.turns["question"].tolist())) == 2
    assert "12 answers of later turns" in contradictions(catalogue, np.zeros(12, np.int64)).obstacle


def test_answers_without_images_are_compared_with_those_after_them_and_have_no_near_images(tmp_path: Path) -> None:
    lines = []
    for number in range(40):
        talk = conversation("Which colour?" if number % 2 else f"What of {number}?", "blue" if number == 7 else "red")
        lines.append({"id": f"text-{number}", "conversations": talk, "split": "eval" if number > 29 else "train"})
    job = job_config(tmp_path / "root", source=str(write_json(tmp_path / "a.json", lines)), max_split_error=1.0)
    found, catalogue = audit(AuditRequest(job, run_prepare(job).uri, has_run=False))
    finding = found.finding("suspected_label")
    assert not finding.flagged and "labels judged 0 of 40 answers" in finding.obstacle
    assert "compared with no others" not in finding.obstacle
    nats = np.full((2, 40), 0.05, np.float32)
    wrong = [catalogue.id_of(int(sample)) for sample in catalogue.turns["sample"]].index("text-7")
    nats[:, wrong] = 3.0
    checked = CheckedAnswers(np.arange(40), nats, (nats > 1).astype(np.int32), (10, 100))
    finding = suspected_labels(catalogue, image_vectors(catalogue, found.prepared_uri, None), checked, "")
    assert [flag.id for flag in finding.flagged] == ["text-7"]
    assert "nearest images" not in finding.flagged[0].detail


def test_a_list_that_leaves_nothing_of_a_split_is_noted(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    records = []
    for number in range(6):
        (tmp_path / "images" / f"{number}.png").write_bytes(copy("PNG", Image.new("RGB", (40, 40), (9 * number, 0, 0))))
        split = "eval" if number == 3 else "train"
        talk = conversation(QUESTION, "red")
        records.append({"id": f"a{number}", "image": f"{number}.png", "conversations": talk, "split": split})
    source = write_json(tmp_path / "a.json", records)
    job = job_config(tmp_path / "root", source=str(source), image_folder=str(tmp_path / "images"), max_split_error=1.0)
    found, catalogue = audit(AuditRequest(job, run_prepare(job).uri, has_run=False))
    told = " ".join(lines(found, {}))
    assert "note: the list leaves none of 5 training samples" in told and "none of 1 validation samples" in told
    assert "none of 5 training samples" in build_page("a", found, catalogue.stored)


def of_turns(turns: NDArray[np.void]) -> Catalogue:
    """A catalogue of samples with one image each, named by their numbers."""

    class Split(list[int]):
        name, ids = "train", [str(number) for number in range(len(turns))]

    class Untold(Catalogue):
        def texts(self, sample: int, turn: int = 0) -> tuple[str, str]:
            return "", ""

    stored = SimpleNamespace(splits=(Split(range(len(turns))),), shards=None)
    rows = np.arange(len(turns))
    return Untold(cast(PreparedSamples, stored), turns, rows.astype("S4"), rows, np.arange(len(turns) + 1))


def vectors_of(features: Vectors) -> ImageVectors:
    signatures = np.zeros((len(features), SIGNATURE_BYTES), np.uint8)
    return ImageVectors(np.arange(len(features)), signatures, features, frozenset(), 0)


def test_nothing_is_a_suspect_where_the_model_has_learned_nothing(audited: Audited) -> None:
    vectors = image_vectors(audited.catalogue, audited.uri, None)
    checked = losses(audited, {"sample-7": 4.0}, usual=3.0)
    assert not suspected_labels(audited.catalogue, vectors, checked, "").flagged


def test_an_answer_that_its_question_decides_is_told_by_the_text(audited: Audited) -> None:
    late = {"sample-7": 0.01, "sample-8": 0.01, "logo-2": 0.01, "logo-3": 0.2}
    finding = predicted_by_text(audited.catalogue, losses(audited, late, usual=1.0), "")
    # One guess for all that ask which colour is right of some of them without a look: no evidence.
    assert [one.id for one in finding.flagged] == ["logo-2"]
    assert "2 samples are answered by one guess for their question" in finding.obstacle


def test_the_most_frequent_answer_of_all_is_no_evidence_of_the_text(audited: Audited) -> None:
    catalogue = audited.catalogue
    turns = catalogue.turns.copy()
    turns["answer"] = turns["answer"][0]
    frequent = replace(catalogue, turns=turns)
    assert not predicted_by_text(frequent, losses(audited, {"logo-2": 0.01}, usual=1.0), "").flagged


def test_a_part_of_a_conversation_is_excluded_by_its_record_id(tmp_path: Path) -> None:
    ids, parts = {"a", "b", "c~turn-3"}, ("a", "a~turn-3", "a~turn-7", "b~turn-5", "c~turn-3")
    flagged = [Flagged(id=name, split="train", kind="contradiction", detail="d", is_excluded=True) for name in parts]
    finding = by_records(collected("contradiction", flagged, checked=5, advice=""), ids)
    (tmp_path / "list.jsonl").write_bytes(exclusion_file(Audit(prepared_uri="", findings=(finding,))))
    assert read_exclusions(str(tmp_path / "list.jsonl")).ids == ids
    assert finding.flagged[1].detail == "d; a part of a, all of which is excluded"
