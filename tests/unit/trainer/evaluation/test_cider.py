"""CIDEr-D: figures worked out from the paper's formula by hand, and what must hold of any captions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.cider import Captioned, cider_d, cider_d_of_tokens, looks_like_captions, tokens
from vlmpipe.trainer.evaluation.metrics import Prediction, scores

WORDS = st.lists(st.sampled_from(["a", "cat", "dog", "on", "mat", "runs"]), min_size=1, max_size=8)
PICTURES = st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=3), WORDS), min_size=1, max_size=6)


def words(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def test_of_two_pictures_with_one_word_in_common() -> None:
    # log(2/2) = 0 for "a", log(2/1) for all else. "a cat" said of "a cat": one word and one pair of equal weight, so
    # both cosines are 1; of three and four words there is nothing. 10 x (1 + 1 + 0 + 0) / 4.
    # "a cat" said of "a dog": no n-gram in common has any weight.
    found = cider_d_of_tokens([(words("a cat"), ["a", "cat"]), (words("a dog"), ["a", "cat"])])
    assert found == pytest.approx([5.0, 0.0])


def test_repeated_words_are_clipped_to_the_reference() -> None:
    # Counts (cat 2) and (cat 1) x log 2: min(2, 1) x 1 / (2 x 1) = 1/2 in words; pairs: "cat cat" is in no reference.
    # One word more than the reference: exp(-1 / 72).
    found = cider_d_of_tokens([(words("cat"), ["cat", "cat"]), (words("dog"), ["dog"])])
    assert found == pytest.approx([10 * math.exp(-1 / 72) * 0.5 / 4, 10 / 4])


def test_several_references_count_alike_and_a_word_counts_once_a_picture() -> None:
    # "cat" is in both references of one picture of two: log(2/1), as if it were in one of them.
    found = cider_d_of_tokens([(words("cat", "mat cat"), ["cat"]), (words("dog"), ["x"])])
    of_second = math.exp(-1 / 72) * math.log(2) ** 2 / (math.log(2) * math.hypot(math.log(2), math.log(2)))
    assert found == pytest.approx([10 * (1 + of_second) / 2 / 4, 0.0])


@pytest.mark.parametrize(("others", "score"), [("blue", 10 * 0.5 / 4), ("red", 0.0)])
def test_a_word_of_every_picture_weighs_nothing(others: str, score: float) -> None:
    # Of "red cat" the model says "red dog". Where every other picture is red, too, it has said nothing.
    pictures = [(words("red cat"), ["red", "dog"])] + [(words(f"{others} {n}"), ["x"]) for n in range(3)]
    assert cider_d_of_tokens(pictures)[0] == pytest.approx(score)


@given(PICTURES)
def test_scores_lie_between_0_and_10_and_do_not_depend_on_order(
    pictures: list[tuple[list[list[str]], list[str]]],
) -> None:
    found = cider_d_of_tokens(pictures)
    assert all(0 <= score <= 10 + 1e-9 for score in found)
    assert cider_d_of_tokens(pictures[::-1]) == pytest.approx(found[::-1])
    shuffled = [(references[::-1], caption) for references, caption in pictures]
    assert cider_d_of_tokens(shuffled) == pytest.approx(found)


@given(PICTURES)
def test_nothing_scores_higher_than_the_one_reference_itself(pictures: list[tuple[list[list[str]], list[str]]]) -> None:
    single = [([references[0]], caption) for references, caption in pictures]
    itself = [(references, references[0]) for references, _ in single]
    assert all(
        said <= best + 1e-9 for said, best in zip(cider_d_of_tokens(single), cider_d_of_tokens(itself), strict=True)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog's ball; isn't it?", "a dog 's ball is n't it"),
        ("Two T-shirts, 2.5 m (long).", "two t-shirts 2.5 m long"),
        ("We\N{RIGHT SINGLE QUOTATION MARK}re  1,000!", "we 're 1,000"),
        (" ... ", ""),
    ],
)
def test_words_have_no_punctuation_around_them(text: str, expected: str) -> None:
    assert tokens(text) == expected.split()


def asked(number: int, answer: str, prediction: str, slice_: str = "caption") -> Prediction:
    return Prediction(f"s{number}", 0, slice_, "q", answer, prediction, answer == prediction)


LONG = [asked(0, "a cat sits on the mat", "a cat sits on the mat"), asked(1, "two dogs run in a park", "two dogs")]
SHORT = [asked(2, "red", "red", "color"), asked(3, "two", "2", "color")]


def test_captions_are_recognized_by_length_in_each_slice() -> None:
    assert looks_like_captions(["one two three four", "one two three four five six"])
    assert not looks_like_captions(["one two three four five", "four words it is"]) and not looks_like_captions([])
    found = scores([*LONG, *SHORT], captions="auto")
    assert "cider_d" not in found and "cider_d" not in found["slices"]["color"]
    assert found["slices"]["caption"]["cider_d"] == pytest.approx(
        sum(cider_d([Captioned((one.answer,), one.prediction) for one in LONG])) / 2
    )


def test_cider_d_can_be_forced_on_or_off() -> None:
    assert "cider_d" in scores(SHORT, captions="on")
    assert "cider_d" not in scores(LONG, captions="off")


def test_captions_of_one_picture_are_references_of_one() -> None:
    lines = [asked(0, "a cat on a mat here", "a cat"), asked(1, "one cat sits on it", "other"), *LONG[1:]]
    lines[2] = asked(2, LONG[1].answer, LONG[1].prediction)
    same = {("s0", 0): "picture", ("s1", 0): "picture"}
    expected = cider_d(
        [Captioned((lines[0].answer, lines[1].answer), "a cat"), Captioned((lines[2].answer,), "two dogs")]
    )
    assert scores(lines, same, "on")["cider_d"] == pytest.approx(sum(expected) / 2)


def test_single_image_has_no_score() -> None:
    assert scores(LONG[:1], captions="on")["cider_d"] is None
