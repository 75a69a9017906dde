"""Scores of the exported model on the validation split: `evaluate.json`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, Strict

from vlmpipe.trainer.records.quantized import QuantizedScores
from vlmpipe.trainer.records.record import Part, Record

Figure = Annotated[float, Strict()] | None  # None: not measured


def _whole(value: object) -> object:
    """Programs write whole numbers as 30.0, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[Annotated[int, Strict()] | None, BeforeValidator(_whole)]


class Open(Part):
    """A part with figures of a program of the user's own, which are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, JsonValue]

    def figure(self, name: str) -> float | None:
        """Return the number of that name, known or not; None where there is none."""
        value = getattr(self, name, None)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Scores(Open):
    """Scores of some questions, 0 to 1. `chance` is the majority baseline."""

    questions: Count = None
    exact_match: Figure = None
    vqa_accuracy: Figure = None
    anls: Figure = None
    cider_d: Figure = None
    chance: Figure = None


def _scores(value: object) -> object:
    """Earlier versions recorded a control's slice as its exact match alone, as programs of users' own do."""
    return {"exact_match": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class Control(Open):
    """Scores with another image, without one, or with another selection of visual tokens."""

    questions: Count = None
    exact_match: Figure = None
    slices: dict[str, Annotated[Scores | None, BeforeValidator(_scores)]] = Field(default_factory=dict)
    left_out: Count = None  # questions that had no other image to be asked with
    resized: Count = None  # questions that were shown an image of another size, resized


class ChampionScores(Open):
    """Answers of the model in use to these questions, or the obstacle to asking it."""

    version: int
    run_id: str
    obstacle: str = ""
    questions: Count = None
    exact_match: Figure = None
    in_its_training: Count = None
    paired: dict[str, JsonValue] | None = None  # PairedCounts


class FieldSlice(Part):
    """Questions with one value of a field, or with a number in a range.

    span: lowest and highest number of a range; None of a value. share_of_errors: of all wrong answers.
    exact_match_interval: 95 %, by image. p_corrected: of a difference from all other questions, corrected for all
    values of all fields; None for too few images.
    """

    value: str
    span: tuple[float, float] | None = None
    questions: int
    images: int
    errors: int
    exact_match: float
    exact_match_interval: tuple[float, float]
    share_of_errors: float
    p_corrected: float | None = None
    verdict: str = ""  # worse, better, no difference shown, or too few images


class FieldSlices(Part):
    """The values of a field of data.slices, those with the most errors first; or the obstacle to showing them."""

    values: int  # different ones, also where numbers are in ranges
    without: int  # questions whose record has no value
    obstacle: str = ""
    slices: tuple[FieldSlice, ...] = ()

    @property
    def num_ranges(self) -> int:
        """How many of the slices are ranges of numbers."""
        return sum(part.span is not None for part in self.slices)


class StartSlice(Part):
    """Right answers of the start weights and of the trained ones to the same questions.

    field: of data.slices, or empty for a record's slice. interval: of the difference, 95 %, by image. p_corrected: of
    a difference, corrected for all slices; None for too few images.
    """

    field: str = ""
    name: str
    questions: int
    images: int
    before: float
    after: float
    interval: tuple[float, float]
    p_corrected: float | None = None
    verdict: str = ""  # better, worse, no difference shown, or too few images

    @property
    def difference(self) -> float:
        return self.after - self.before


class Retention(Part):
    """Answers of start and trained weights to the retention probe, or the obstacle to asking it.

    form: benchmarks, where an answer is right, or agreement, where the trained model's is the start's. parts: by
    benchmark or prompt.
    """

    form: str = ""
    obstacle: str = ""
    questions: int = 0
    images: int = 0
    before: float | None = None
    after: float | None = None
    interval: tuple[float, float] | None = None  # of the difference, each end at 5 %
    paired: dict[str, JsonValue] | None = None  # PairedCounts
    parts: tuple[StartSlice, ...] = ()

    def sentence(self) -> str:
        """Return the result in words."""
        if self.before is None or self.after is None or self.interval is None:
            return f"no retention probe: {self.obstacle}" if self.obstacle else ""
        what = f"the same answer to {self.after:.3f}" if self.form == "agreement" else f"{self.after:.3f}"
        beside = "" if self.form == "agreement" else f", {self.before:.3f} at the start"
        low, high = self.interval
        return (
            f"retention {what} of {self.questions:,} probe questions{beside} ({self.after - self.before:+.3f}, "
            f"{low:+.3f} to {high:+.3f}, each end at 5 %)"
        )


class StartScores(Part):
    """Answers of the weights that training started from to the same questions, or the obstacle to asking them."""

    origin: str = ""  # where the weights are from, in words
    obstacle: str = ""
    note: str = ""  # of answers that were kept from an earlier run and not used, or that were not kept for later ones
    is_reused: bool = False  # kept from an earlier run with the same weights, data and settings
    questions: int = 0
    images: int = 0
    before: float | None = None
    after: float | None = None
    interval: tuple[float, float] | None = None  # of the difference, each end at 5 %
    paired: dict[str, JsonValue] | None = None  # PairedCounts
    slices: tuple[StartSlice, ...] = ()  # those with the largest differences first
    retention: Retention | None = None
    wall_s: float = 0.0

    def sentence(self) -> str:
        """Return the result in words; empty for a random start."""
        if self.before is None or self.after is None or self.interval is None:
            return f"the start weights were not asked: {self.obstacle}" if self.obstacle and self.origin else ""
        low, high = self.interval
        return (
            f"gain over the start {self.after - self.before:+.3f}, from {self.before:.3f} to {self.after:.3f} "
            f"({low:+.3f} to {high:+.3f}, each end at 5 %; {self.questions:,} questions)"
        )


class ConfusionTable(Part):
    """Counts by expected answer (rows) and given answer (columns)."""

    answers: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


class Confusions(Part):
    """A table for each slice with few answers, and the one that the console shows."""

    shown: str | None = None
    note: str = ""
    slices: dict[str, ConfusionTable] = Field(default_factory=dict)


class LikeTrain(Part):
    """A benchmark's image and the training image that it looks like. `train`: id of the sample, number of its image."""

    image: str
    picture: str  # file in the run's folder
    train: tuple[str, int]
    distance: float


class BenchmarkScores(Open):
    """Scores of a published set of questions, with 95 % intervals."""

    format: str = ""
    questions: Count = None  # that each score stands on
    asked: Count = None  # those and the rotations of multiple choices
    images: Count = None
    scores: dict[str, Figure] = Field(default_factory=dict)
    intervals: dict[str, tuple[float, float] | None] = Field(default_factory=dict)
    max_new_tokens: Count = None
    cut_answers: Count = None
    compared: str | None = None  # the score that the answers' file holds, by question
    questions_sha256: str | None = None
    images_like_train: Count = None
    like_train_compared: Figure = None  # share of the pairs of images
    pairs_like_train: tuple[LikeTrain, ...] = ()


class Evaluation(Record, Scores):
    """Scores, baselines, controls and benchmarks. A program of the user's own leaves what it measures."""

    FILE: ClassVar[str] = "evaluate.json"
    STEP: ClassVar[str] = "evaluate"
    INDENT: ClassVar[int | None] = None
    IS_SPARSE: ClassVar[bool] = True

    samples: Count = None
    slices: dict[str, Annotated[Scores, BeforeValidator(_scores)]] = Field(default_factory=dict)
    relevance: dict[str, JsonValue] | None = None
    paired: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)  # PairedCounts by baseline
    champion: ChampionScores | None = None
    start: StartScores | None = None
    quantized: dict[str, QuantizedScores] = Field(default_factory=dict)  # by format
    loss: Figure = None
    perplexity: Figure = None
    preference_accuracy: Figure = None
    max_new_tokens: Count = None
    cut_answers: Count = None
    longer_expected_answers: Count = None
    earlier_turns: str | None = None
    questions_after_turns: Count = None
    out_of_memory: Count = None
    batch_tokens: Count = None
    confusion: Confusions | None = None
    benchmarks: dict[str, BenchmarkScores] = Field(default_factory=dict)
    controls: dict[str, Control] = Field(default_factory=dict)
    by_field: dict[str, FieldSlices] = Field(default_factory=dict)
    images: Count = None
    images_also_in_train: Count = None
    images_like_train: Count = None
    like_train_compared: Figure = None  # share of the pairs of images
    wall_s: Figure = None


def ranges_sentence(name: str, values: int, ranges: int) -> str:
    """Sentence for readers of a field with ranges. values: how many different ones it has."""
    return f"{name} of data.slices has {values:,} values: its numbers are shown in {ranges} ranges"
