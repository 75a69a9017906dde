"""Scores of benchmarks against their published definitions, worked out by hand on examples of our own."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from vlmpipe.trainer.config.benchmarks import FORMATS, SCORES, BenchmarkFormat
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.evaluation.benchmarks.captions import rouge_l
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.benchmarks.scores import Scored, chosen_letter, relaxed_match, says_yes, score

CHOICES = (("A", "a red bus"), ("B", "two dogs"), ("C", "a cat"))


def asked(number: int, *answers: str, group: int | None = None, slice_: str = "all") -> BenchmarkQuestion:
    image = ImageRef(f"{number}.jpg", lambda: b"")
    return BenchmarkQuestion(
        str(number), "?", image, answers, slice_, CHOICES, group="" if group is None else str(group)
    )


def scored(form: BenchmarkFormat, *pairs: tuple[BenchmarkQuestion, str]) -> Scored:
    return score(form, [question for question, _ in pairs], [said for _, said in pairs])


def test_vqa_accuracy_is_the_mean_of_the_consensus_of_ten() -> None:
    people = ["red"] * 2 + ["blue"] * 8
    for form in ("vqav2", "textvqa"):
        found = scored(form, (asked(1, *people), "Red."), (asked(2, *people), "blue"))  # type: ignore[arg-type]
        assert found.scores() == pytest.approx({"vqa_accuracy": (0.6 + 1) / 2})


def test_docvqa_takes_the_best_answer_and_nothing_up_to_one_half() -> None:
    # "1O May" to "10 may": 1 of 6 letters; "June" to "july" 2 of 4: one half counts 0; to "2020" nothing is alike.
    pairs = [(asked(1, "10 may", "may"), "1O May"), (asked(2, "july"), "June"), (asked(3, "2020"), "June")]
    assert scored("docvqa", *pairs).scores() == pytest.approx({"anls": (5 / 6 + 0 + 0) / 3})


@pytest.mark.parametrize(
    ("said", "is_yes"),
    [
        ("Yes, there is.", True),
        ("No.", False),
        ("no", False),
        ("There is not a cup, yes", False),
        ("I see. There is no cup", True),  # only the first sentence counts
        ("Nothing there", True),  # not one of the three words
        ("", True),
    ],
)
def test_pope_reads_no_from_three_words_of_the_first_sentence(said: str, is_yes: bool) -> None:
    assert says_yes(said) == is_yes


def test_pope_scores_are_those_of_the_confusion_table() -> None:
    # 3 true, 1 false positive; 2 true, 2 false negatives.
    said = [("yes", "yes")] * 3 + [("no", "yes")] + [("no", "no")] * 2 + [("yes", "no")] * 2
    found = scored("pope", *((asked(number, label), answer) for number, (label, answer) in enumerate(said)))
    assert found.scores() == pytest.approx(
        {"accuracy": 5 / 8, "precision": 3 / 4, "recall": 3 / 5, "f1": 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5),
         "yes_ratio": 4 / 8}
    )  # fmt: skip
    never = scored("pope", (asked(1, "yes"), "no"), (asked(2, "no"), "no")).scores()
    assert never == {"accuracy": 0.5, "precision": 0.0, "recall": 0.0, "f1": 0.0, "yes_ratio": 0.0}


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("B. two dogs", "B"),
        ("The answer is B, because of the fur.", ""),  # as VLMEvalKit: the letter is none of the last four words
        ("The answer is B, I think.", "B"),
        ("Two dogs!", "B"),  # by its text
        ("A", "A"),
        ("A dog can be seen", ""),
        ("The answer is A.", "A"),
        ("A big brown animal can be seen here", ""),  # the article: the letter is none of the last four words
        ("A or B", ""),
        ("a red bus and a cat", ""),
        ("D", ""),
        ("", ""),
    ],
)
def test_a_choice_is_read_by_its_letter_and_then_by_its_text(said: str, letter: str) -> None:
    assert chosen_letter(said, CHOICES) == letter


def test_the_mean_of_the_questions_scores_is_the_formats_first_score() -> None:
    """What compare shows is then what report and gate show."""
    sets: dict[BenchmarkFormat, list[tuple[BenchmarkQuestion, str]]] = {
        "mmbench": [(asked(n, "A", group=n), "A") for n in range(10)]
        + [(asked(1_000_000 + n, "B", group=n), "C") for n in range(10)],
        "pope": [(asked(1, "yes"), "yes"), (asked(2, "no"), "yes"), (asked(3, "no"), "no")],
        "docvqa": [(asked(1, "invoice"), "invoise"), (asked(2, "12"), "x")],
        "chartqa": [(asked(1, "100"), "104"), (asked(2, "5"), "9")],
        "textvqa": [(asked(1, *["stop"] * 9, "go"), "stop"), (asked(2, *["a"] * 10), "go")],
        "vqav2": [(asked(1, *["yes"] * 10), "yes"), (asked(2, *["no"] * 10), "yes")],
        "coco-captions": [(asked(1, "a cat on a mat"), "a cat on a mat"), (asked(2, "two red dogs run"), "a red dog")],
    }
    assert set(sets) == set(FORMATS)
    for form, pairs in sets.items():
        found = scored(form, *pairs)
        counted = [value for value in found.of_questions if value is not None]
        assert fmean(counted) == pytest.approx(found.scores()[SCORES[form][0]]), form
    assert scored("mmbench", *sets["mmbench"]).scores()["accuracy"] == 1.0


def test_circular_evaluation_counts_a_question_that_is_right_in_every_rotation() -> None:
    # Question 1 is right in all rotations, question 2 only as it stands.
    pairs = [
        (asked(1, "A", group=1), "A"),
        (asked(1_000_001, "B", group=1), "B"),
        (asked(2, "B", group=2), "B"),
        (asked(1_000_002, "C", group=2), "B"),
    ]
    assert scored("mmbench", *pairs).scores() == {"accuracy": 1.0, "circular_accuracy": 0.5}
    assert scored("mmbench", pairs[0], pairs[2]).scores() == {"accuracy": 1.0}, "a file without rotations"


@pytest.mark.parametrize(
    ("answer", "said", "is_right"),
    [
        ("100", "105", True),
        ("100", "105.1", False),
        ("-20", "-19", True),
        ("0.5", "50%", True),
        ("5%", "5", False),
        ("2019", "2010", True),  # years are numbers, too
        ("0", "0.0", False),  # 0 has no relative error: compared as text
        ("0", "0", True),
        ("Germany", "germany ", True),
        ("Germany", "Germania", False),
        ("12", "twelve", False),
        ("1,000", "1000", False),
    ],
)
def test_relaxed_accuracy_allows_5_percent_of_a_number(answer: str, said: str, is_right: bool) -> None:
    assert relaxed_match(answer, said) == is_right
    assert scored("chartqa", (asked(1, answer), said)).scores() == {"relaxed_accuracy": float(is_right)}


def test_bleu_4_clips_counts_and_punishes_short_captions() -> None:
    # 7 words against 8 and 6, which are equally close: the shorter one counts, so there is no penalty.
    # All words but "now" are known, "the" twice: 6/7; pairs 5/6; threes 4/5; fours 3/4.
    # The second caption is its reference: 5/5, 4/4, 3/3, 2/2.
    pairs = [
        (asked(1, "the cat sat on the mat", "there is a cat on a mat today"), "the cat sat on the mat now"),
        (asked(2, "two dogs run very fast"), "two dogs run very fast"),
    ]
    precisions = [(6 + 5) / (7 + 5), (5 + 4) / (6 + 4), (4 + 3) / (5 + 3), (3 + 2) / (4 + 2)]
    expected = math.exp(sum(map(math.log, precisions)) / 4)
    assert scored("coco-captions", *pairs).scores()["bleu_4"] == pytest.approx(expected)
    short = [(question, " ".join(said.split()[:4])) for question, said in pairs]  # 8 words against 11
    assert scored("coco-captions", *short).scores()["bleu_4"] == pytest.approx(math.exp(1 - 11 / 8))
    none = [(question, "one two three") for question, _ in pairs]
    assert 0 < scored("coco-captions", *none).scores()["bleu_4"] < 1e-3


def test_rouge_l_takes_the_best_precision_and_the_best_recall() -> None:
    # "a cat sat there": of "a cat sat down now" a, cat, sat: precision 3/4, recall 3/5; of "cat there" recall 2/2.
    references = [["a", "cat", "sat", "down", "now"], ["cat", "there"]]
    precision, recall = 3 / 4, 1.0
    expected = (1 + 1.2**2) * precision * recall / (recall + 1.2**2 * precision)
    assert rouge_l(references, ["a", "cat", "sat", "there"]) == pytest.approx(expected)
    assert rouge_l(references, ["dog"]) == rouge_l(references, []) == 0.0


def test_captions_have_cider_d_too() -> None:
    # As in the tests of CIDEr-D: "a cat" of "a cat" is 5, of "a dog" 0.
    found = scored("coco-captions", (asked(1, "a cat"), "a cat"), (asked(2, "a dog"), "a cat"))
    assert found.scores()["cider_d"] == pytest.approx(2.5)
    assert tuple(found.scores()) == SCORES["coco-captions"]


def test_slices_have_their_own_scores_and_intervals_hold_the_score() -> None:
    pairs = [
        (asked(number, *["yes"] * 10, slice_="yes/no" if number % 2 else "other"), "yes" if number % 3 else "no")
        for number in range(60)
    ]
    found = scored("vqav2", *pairs)
    assert found.scores() == pytest.approx({"vqa_accuracy": 2 / 3})
    assert found.slices()["yes/no"] == pytest.approx({"questions": 30, "vqa_accuracy": 2 / 3})
    (low, high) = found.intervals()["vqa_accuracy"]
    # Normal approximation: 2/3 -+ 1.96 x sqrt(2/9 / 60).
    half = 1.96 * math.sqrt(2 / 9 / 60)
    assert (low, high) == pytest.approx((2 / 3 - half, 2 / 3 + half), abs=0.025)
