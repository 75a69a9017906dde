"""Sources: what the built-in sets promise."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sample import Sample, split_of
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sources.builtin.digit_mosaics import DigitMosaicsSource
from vlmpipe.trainer.data.sources.builtin.digit_scans import read_digit_scans
from vlmpipe.trainer.data.sources.builtin.digits import DigitsSource
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError


def samples_of(name: str, count: int | None = None) -> list[Sample]:
    source = open_source(DataConfig(source=f"builtin:{name}", sequence_length=100))
    return [sample for sample in islice(source, count) if isinstance(sample, Sample)]


def scans_of(sample: Sample) -> set[str]:
    return set(sample.id.split("-")[1:])


# ---- digits


def test_scans_are_those_of_scikit_learn_and_need_no_import_of_it() -> None:
    program = (
        "import sys; from vlmpipe.trainer.data.sources.builtin.digits import DigitsSource; "
        "next(iter(DigitsSource(0.1))).images[0].read(); sys.exit('sklearn' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    from sklearn.datasets import load_digits

    found, expected = read_digit_scans(), load_digits()
    assert found.images.dtype == expected.images.dtype and np.array_equal(found.images, expected.images)
    assert found.labels == expected.target.tolist()


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
    [
        ("openmoji", "resvg_py", "resvg-py"),
        ("easy-vqa", "easy_vqa", "easy-vqa"),
        ("digits", "sklearn", "scikit-learn"),
        ("digit-mosaics", "sklearn", "scikit-learn"),
    ],
)
def test_a_missing_package_is_named(name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'vlmpipe\[data\]'") as caught:
        next(iter(open_source(DataConfig(source=f"builtin:{name}", sequence_length=100))))
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert f"package {package} is not installed" in str(caught.value)


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(UserError, match=r"scikit-learn is not installed(.|\n)*pip install 'vlmpipe\[data\]'"):
        open_source(DataConfig(source="builtin:digits", sequence_length=100)).fingerprint()


def test_an_unknown_built_in_set_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"builtin:digits, builtin:digit-mosaics, .*, builtin:openmoji"):
        open_source(DataConfig(source="builtin:imagenet", sequence_length=100))


def test_the_split_of_an_id_does_not_move() -> None:
    held_out = [number for number in range(1000) if split_of(f"sample-{number}", 0.1) == "eval"]
    assert 70 < len(held_out) < 130
    assert set(held_out) <= {number for number in range(1000) if split_of(f"sample-{number}", 0.2) == "eval"}


# ---- mosaics of digits


def test_a_mosaic_shows_the_asked_digit_in_its_region() -> None:
    from sklearn.datasets import load_digits

    scans = load_digits()
    sizes = set()
    for sample in islice(DigitMosaicsSource(0.1, one_question=False), 40):
        pixels = np.asarray(Image.open(io.BytesIO(sample.images[0].read())))
        height, width, _ = pixels.shape
        sizes.add((height // 8, width // 8))
        assert len({turn.question for turn in sample.turns}) == 3
        for turn in sample.turns:
            left, top, right, bottom = turn.region
            cell = pixels[round(top * height) : round(bottom * height), round(left * width) : round(right * width)]
            digits = {int(d) for d, scan in zip(scans.target, scans.images, strict=True)
                      if np.array_equal((scan / 16 * 255).astype(np.uint8), cell.max(-1))}  # fmt: skip
            assert digits == {int(turn.answer)}
    assert len(sizes) > 10 and all(2 <= side <= 6 for size in sizes for side in size)


def test_a_single_question_is_about_the_same_scans_in_36_cells() -> None:
    many, one = (next(iter(DigitMosaicsSource(0.1, one_question=alone))) for alone in (False, True))
    asked = [(turn.question, turn.answer) for turn in many.turns]
    assert many.id == one.id and [(turn.question, turn.answer) for turn in one.turns] == asked[:1]
    assert Image.open(io.BytesIO(one.images[0].read())).size == (48, 48)
