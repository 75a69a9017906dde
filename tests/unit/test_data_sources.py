"""Sources: what the built-in sets promise, and sentences for files that are not LLaVA's."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data_fixture import conversation, llava_folder, png, record, write_json
from trainer.config import DataConfig
from trainer.data.rejects import Reject
from trainer.data.samples import Sample, split_of
from trainer.data.sources import open_source
from trainer.data.sources.digits import DigitsSource
from trainer.data.sources.llava import LlavaSource
from trainer.errors import ConfigError, DataError, ExitCode, UserError


def samples_of(name: str, count: int | None = None) -> list[Sample]:
    source = open_source(DataConfig(source=f"builtin:{name}", row_tokens=100))
    return [sample for sample in islice(source, count) if isinstance(sample, Sample)]


def scans_of(sample: Sample) -> set[str]:
    return set(sample.id.split("-")[1:])


# ---- digits


def test_no_scan_of_the_digits_is_in_both_splits() -> None:
    scans: dict[str | None, set[str]] = {"train": set(), "eval": set()}
    for sample in DigitsSource(0.1):
        scans[sample.split] |= scans_of(sample)
    assert not scans["train"] & scans["eval"]
    assert len(scans["train"]) + len(scans["eval"]) == 1797
    assert 0.07 < len(scans["eval"]) / 1797 < 0.13


def test_digit_answers_are_true() -> None:
    from sklearn.datasets import load_digits

    labels = load_digits().target
    for sample in islice(DigitsSource(0.1), 300):
        digits = [int(labels[int(scan)]) for scan in sample.id.split("-")[1:]]
        truth = {
            "what digit is this?": str(digits[0]),
            "is it even?": "no" if digits[0] % 2 else "yes",
            "is it greater than 4?": "yes" if digits[0] > 4 else "no",
            "what is the sum?": str(sum(digits)),
            "what is the larger digit?": str(max(digits)),
            "what is the smaller digit?": str(min(digits)),
            "is the sum greater than 9?": "yes" if sum(digits) > 9 else "no",
        }
        assert len(sample.turns) == (3 if len(digits) == 1 else 4)
        for turn in sample.turns:
            assert truth[turn.question.removeprefix("<image>\n")] == turn.answer


def test_a_digit_canvas_shows_its_scans_and_nothing_else() -> None:
    from sklearn.datasets import load_digits

    scans = load_digits().images
    for sample in islice(DigitsSource(0.1), 30):
        canvas = np.asarray(Image.open(io.BytesIO(sample.images[0].read())))
        small = canvas.reshape(16, 4, 16, 4)[:, 0, :, 0]
        cells = [small[row : row + 8, column : column + 8] for row in (0, 8) for column in (0, 8)]
        shown = sorted(cell.tobytes() for cell in cells if cell.any())
        wanted = [(scans[int(scan)] * (255 / 16)).astype(np.uint8) for scan in sample.id.split("-")[1:]]
        assert shown == sorted(cell.tobytes() for cell in wanted)


def test_any_question_about_digits_can_come_first() -> None:
    first = Counter(sample.turns[0].slice for sample in DigitsSource(0.1))
    singles, pairs = {"digit", "even", "greater_than_4"}, {"sum", "larger_digit", "smaller_digit", "sum_greater_than_9"}
    assert set(first) == singles | pairs
    assert min(first.values()) > 400


def test_digits_are_the_same_each_time() -> None:
    def content(count: int) -> list[tuple[str, object, bytes]]:
        return [(s.id, s.turns, s.images[0].read()) for s in islice(DigitsSource(0.1), count)]

    assert content(50) == content(50)


# ---- easy-vqa and openmoji


def test_easy_vqa_keeps_every_question_and_its_own_test_pictures() -> None:
    samples = samples_of("easy-vqa")
    assert Counter(sample.split for sample in samples) == {"train": 4000, "eval": 1000}
    questions = Counter((sample.split, turn.slice) for sample in samples for turn in sample.turns)
    assert sum(questions.values()) == 38_575 + 9_673
    assert (questions["train", "yes_no"], questions["eval", "yes_no"]) == (28_407, 7_136)
    assert len({sample.id for sample in samples}) == 5000


def test_the_first_records_of_easy_vqa_hold_both_splits() -> None:
    assert Counter(sample.split for sample in samples_of("easy-vqa", 10)) == {"train": 8, "eval": 2}


def test_openmoji_pictures_have_their_unicode_name() -> None:
    pytest.importorskip("resvg_py")
    samples = {sample.id: sample for sample in samples_of("openmoji")}
    assert len(samples) > 1000
    assert samples["openmoji-1F6B3"].turns[0].answer == "no bicycles"
    image = Image.open(io.BytesIO(samples["openmoji-1F6B3"].images[0].read()))
    assert (image.size, image.mode) == ((64, 64), "RGB")
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getextrema() != ((255, 255),) * 3


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("openmoji", "resvg_py", "resvg-py"), ("easy-vqa", "easy_vqa", "easy-vqa"), ("digits", "sklearn", "scikit-learn")],
)
def test_a_missing_package_is_named(name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {package}") as caught:
        open_source(DataConfig(source=f"builtin:{name}", row_tokens=100)).fingerprint()
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_an_unknown_built_in_set_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="builtin:digits, builtin:easy-vqa, builtin:openmoji"):
        open_source(DataConfig(source="builtin:imagenet", row_tokens=100))


# ---- LLaVA files


def read(path: Path, folder: Path | str = "") -> list[Sample | Reject]:
    return list(LlavaSource(str(path), str(folder)))


def test_json_and_json_lines_give_the_same_samples(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    array = write_json(tmp_path / "a.json", records)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(line).encode() for line in records))
    from_array, from_lines = read(array, images), read(lines, images)
    assert [sample.content_digest() for sample in from_array if isinstance(sample, Sample)] == [
        sample.content_digest() for sample in from_lines if isinstance(sample, Sample)
    ]
    assert len(from_array) == 3
    assert from_array[2].where == "a.json record 3" and from_lines[2].where == "a.jsonl line 5"


def test_roles_may_be_named_either_way_and_a_system_message_joins_the_first_question(tmp_path: Path) -> None:
    messages = [
        {"from": "system", "value": "Be brief."},
        {"from": "user", "value": "<image>\nWhat?"},
        {"from": "assistant", "value": "A cat. "},
    ]
    (sample,) = read(write_json(tmp_path / "a.json", [{"image": "1.png", "conversations": messages}]))
    assert isinstance(sample, Sample)
    assert [(turn.question, turn.answer) for turn in sample.turns] == [("Be brief.\n<image>\nWhat?", "A cat.")]


def test_optional_keys_set_slice_and_split_and_ids_may_be_missing_or_numbers(tmp_path: Path) -> None:
    records = [record(1, id=7, slice="ocr", split="eval"), record(2), record(3)]
    del records[1]["id"]
    samples = [sample for sample in read(write_json(tmp_path / "a.json", records)) if isinstance(sample, Sample)]
    assert (samples[0].id, samples[0].split, samples[0].turns[1].slice) == ("7", "eval", "ocr")
    assert len(samples[1].id) == 16 and samples[1].split is None
    again = read(write_json(tmp_path / "b.json", [records[0], records[2], records[1]]))
    assert again[2].id == samples[1].id  # an id from content does not depend on the place in the file


def test_a_file_in_a_bucket_is_read_through_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.storage.BUCKETS_MOUNT", tmp_path)
    folder = tmp_path / "bucket" / "set"
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(folder / "images" / "1.png")
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "black"}]
    (folder / "llava.json").write_text(json.dumps([{"id": "1", "image": "1.png", "conversations": turns}]))
    (sample,) = LlavaSource("gs://bucket/set/llava.json", "gs://bucket/set/images")
    assert isinstance(sample, Sample) and sample.images[0].read() == (folder / "images" / "1.png").read_bytes()


def test_the_split_of_an_id_does_not_move() -> None:
    held_out = [number for number in range(1000) if split_of(f"sample-{number}", 0.1) == "eval"]
    assert 70 < len(held_out) < 130
    assert set(held_out) <= {number for number in range(1000) if split_of(f"sample-{number}", 0.2) == "eval"}


def test_a_fingerprint_follows_records_and_images(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    path = write_json(tmp_path / "a.json", records)
    prints = [LlavaSource(str(path), str(images)).fingerprint()]
    prints.append(LlavaSource(str(path), str(images)).fingerprint())
    (images / "1.png").write_bytes(png(99, side=30))
    prints.append(LlavaSource(str(path), str(images)).fingerprint())
    write_json(path, records[:2])
    prints.append(LlavaSource(str(path), str(images)).fingerprint())
    (images / "not-referenced.png").write_bytes(png(5))
    prints.append(LlavaSource(str(path), str(images)).fingerprint())
    assert [prints.index(value) for value in prints] == [0, 0, 2, 3, 3]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.json", None, ConfigError, "does not exist"),
        ("a.csv", "id,image", ConfigError, "neither a built-in set nor a .json or .jsonl"),
        ("a.json", "not json", DataError, "is not JSON"),
        ("a.json", '{"id": 1}\n{"id": 2}', DataError, "name the file .jsonl"),
        ("a.json", '{"images": [], "annotations": []}', DataError, "the keys 'images', 'annotations'"),
        ("a.json", '[{"url": "x", "caption": "y"}]', DataError, "the keys 'url', 'caption'"),
        ("a.json", '["x"]', DataError, "found a str"),
        ("a.json", "[]", DataError, "holds no records"),
        ("a.jsonl", "", DataError, "holds no records"),
        ("a.jsonl", "PNG", DataError, "not JSON"),
    ],
)
def test_a_file_that_is_not_llava_is_a_sentence(
    tmp_path: Path, name: str, text: str | None, error: type[UserError], message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        read(tmp_path / name)


def test_a_file_in_another_encoding_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json.dumps([record(1)]).encode("utf-16"))
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path / "a.json")


def test_the_image_folder_must_exist_and_hold_images(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [record(1)])
    with pytest.raises(ConfigError, match="is not a folder"):
        read(path, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no images")
    with pytest.raises(DataError, match="holds no images"):
        read(path, tmp_path / "empty")


def test_one_odd_record_first_does_not_condemn_the_file(tmp_path: Path) -> None:
    good = {"id": "2", "conversations": conversation("What?", "That.")}
    first, second = read(write_json(tmp_path / "a.json", [{"url": "x"}, good]))
    assert isinstance(first, Reject) and isinstance(second, Sample)
