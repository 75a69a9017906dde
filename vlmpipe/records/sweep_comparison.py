"""Variants of a sweep compared with each other: `comparison.json`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, JsonValue, computed_field

from vlmpipe.trainer.records.record import Part, Record

Answer = Literal["supported", "contradicted", "not shown", "not measured"]


class Measured(Part):
    """A value with its 95 % interval.

    could_see: of a difference, how large one must be to be shown in four of five such sweeps.
    """

    value: float
    interval: tuple[float, float]
    could_see: float | None = None


class ComparedVariant(Part):
    """A variant. `score` is None where no training of it is done; differences are None of the baseline too.

    p_corrected: of a difference from the baseline, corrected for the number of variants.
    selection: means of evaluate.json's section relevance. seconds: means of a training, and of its evaluation.
    device_hours: of one training with its evaluation; GPUs, or processes on the CPU.
    on_front: the costs (image_tokens, device_hours) at which no other variant is better.
    """

    name: str
    values: dict[str, JsonValue] = Field(default_factory=dict)
    starts: int
    errors: tuple[str, ...] = ()
    score: Measured | None = None
    difference: Measured | None = None
    p_corrected: float | None = None
    verdict: str = ""
    selection: dict[str, float] | None = None
    train_s: float = 0.0
    evaluate_s: float = 0.0
    device_hours: float = 0.0
    on_front: tuple[str, ...] = ()


class Hypothesis(Part):
    """A claim and the sweep's answer. `differences` are those from each variant of `against`."""

    claim: str
    variant: str
    against: tuple[str, ...]
    margin: float
    answer: Answer
    differences: tuple[Measured, ...] = ()
    p_corrected: float | None = None


class SweepComparison(Record):
    """job_s: seconds of all jobs together; train_s and evaluate_s are the parts that trained and evaluated."""

    FILE: ClassVar[str] = "comparison.json"
    STEP: ClassVar[str] = "compare-variants"

    metric: str
    baseline: str
    questions: int
    variants: tuple[ComparedVariant, ...]
    hypotheses: tuple[Hypothesis, ...] = ()
    job_s: float = 0.0
    train_s: float = 0.0
    evaluate_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def ranked(self) -> list[tuple[ComparedVariant, Measured]]:
        """Variants with their scores, best first."""
        measured = [(variant, variant.score) for variant in self.variants if variant.score]
        return sorted(measured, key=lambda pair: -pair[1].value)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def best(self) -> str:
        return self.ranked[0][0].name

    @computed_field  # type: ignore[prop-decorator]
    @property
    def failed(self) -> int:
        """Trainings that failed."""
        return sum(len(variant.errors) for variant in self.variants)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def share_outside(self) -> float | None:
        """Share of the jobs' time that neither trained nor evaluated; None where it was not measured, and in a sweep
        that was continued, whose jobs have the time of their last attempt alone."""
        share = 1 - (self.train_s + self.evaluate_s) / self.job_s if self.job_s else -1.0
        return share if share >= 0 else None

    @property
    def sentence(self) -> str:
        variant, score = self.ranked[0]
        low, high = score.interval
        failed = f"; {self.failed} trainings failed" if self.failed else ""
        return (
            f"best of {len(self.variants)} variants: {variant.name}, {self.metric} {score.value:.3f} "
            f"({low:.3f} to {high:.3f}){failed}"
        )
