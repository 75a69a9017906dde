"""Scores by number of training samples, the law fitted to them, and what more samples would bring: `curve.json`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import computed_field

from vlmpipe.trainer.records.record import Part, Record

Form = Literal["power", "logistic", "exponential"]
Answer = Literal[
    "needs", "reached", "above the ceiling", "too far", "flat", "nothing learned", "too few points", "too few images"
]


class Between(Part):
    """A value with the ends of its 80 % interval. A `high` of None: no upper end."""

    value: float
    low: float
    high: float | None = None


class CurvePoint(Part):
    """A share of the training samples. `score` is None where no training of it is done.

    samples: of a training, the mean over starts. skipped: further starts that were not trained, as the first was at the
    majority baseline. fitted: whether the law is fitted to it.
    """

    variant: str
    share: float
    samples: float
    starts: int
    skipped: int = 0
    errors: tuple[str, ...] = ()
    score: Between | None = None
    at_baseline: bool = False
    fitted: bool = False
    train_s: float = 0.0


class Law(Part):
    """The most likely law of those that are fitted: error = floor + scale x fall((samples / at) ^ exponent).

    form: whose fall of x is 1 / x (power), 1 / (1 + x) (logistic) or e ^ -x (exponential).
    """

    form: Form
    floor: float
    scale: float
    exponent: float
    at: float

    @property
    def formula(self) -> str:
        """Return the law as a formula."""
        ratio = f"(samples / {self.at:,.0f})^{self.exponent:.2f}"
        falls = {"power": f"/ {ratio}", "logistic": f"/ (1 + {ratio})", "exponential": f"x e^-{ratio}"}
        return f"error = {self.floor:.3f} + {self.scale:.3g} {falls[self.form]}"


class Prediction(Part):
    """A predicted score of one training on `samples`; `measured` where one was hidden to check the law."""

    samples: float
    score: Between
    measured: float | None = None

    @property
    def is_inside(self) -> bool | None:
        """Return whether the measured score is inside the interval; None where none was measured."""
        high = self.score.high
        return None if self.measured is None or high is None else self.score.low <= self.measured <= high


class TrainingCost(Part):
    """Cost of one training by its samples: `fixed` + `per_sample` x samples. usd_per_hour: by the plan; None: no price.

    origin: where the hours come from.
    """

    fixed_hours: float
    per_sample_hours: float
    usd_per_hour: float | None = None
    origin: Literal["plan", "measured"] = "measured"

    def hours(self, samples: float) -> float:
        """Return the hours of one training."""
        return self.fixed_hours + self.per_sample_hours * samples

    def usd(self, samples: float) -> float | None:
        """Return the dollars of one training; None without a price."""
        return None if self.usd_per_hour is None else self.usd_per_hour * self.hours(samples)


class LearningCurve(Record):
    """A learning curve. Intervals are those of 80 %.

    goal: the score that `needed` samples reach. ceiling: the score that no number of samples exceeds.
    visible: the smallest difference of two trainings that these questions show in four of five cases. noise_from: the
    samples beyond which all that is left to gain is smaller.
    checked: the largest share, predicted from the smaller ones.
    max_steps: at which each training ends, whatever its epochs; 0: none.
    baseline: score of the majority baseline; None where the metric has none.
    """

    FILE: ClassVar[str] = "curve.json"
    STEP: ClassVar[str] = "compare-variants"

    metric: str
    goal: float
    answer: Answer
    questions: int
    images: int
    epochs: int
    max_steps: int = 0
    baseline: float | None = None
    points: tuple[CurvePoint, ...]
    law: Law | None = None
    needed: Between | None = None
    ceiling: Between | None = None
    visible: float | None = None
    noise_from: float | None = None
    checked: Prediction | None = None
    predictions: tuple[Prediction, ...] = ()
    cost: TrainingCost | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> float:
        """Return the training samples that there are."""
        return max(point.samples for point in self.points)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def needed_cost_usd(self) -> float | None:
        """Dollars of one training on the needed samples, where the price is known."""
        return self.cost.usd(self.needed.value) if self.cost and self.needed else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def decision(self) -> str:
        """The answer in a sentence."""
        goal, there = percent(self.goal), f"{round(self.samples):,}"
        match self.answer:
            case "needs" if self.needed:
                more = count(max(0.0, self.needed.value - self.samples))
                return f"{goal} needs about {between(self.needed)} samples, {more} more than there are"
            case "reached" if self.needed:
                return f"{goal} is reached with about {between(self.needed)} of the {there} samples"
            case "above the ceiling" if self.ceiling:
                ends = f"{percent(self.ceiling.value)} ({percents(self.ceiling)})"
                return f"cannot be said what {goal} needs: it is above the ceiling, by this curve {ends}"
            case "too far":
                return f"cannot be said what {goal} needs: more than 10 times the {there} samples that there are"
            case "flat":
                return "cannot be said: the curve is flat, its shares do not differ by more than noise"
            case "nothing learned":
                return "cannot be said: fewer than 3 shares are above the majority baseline"
            case "too few images":
                return f"cannot be said: {self.images} images of validation questions tell nothing of others"
        return "cannot be said: fewer than 3 different numbers of samples have a score"

    @property
    def advice(self) -> str:
        """Return the change that would allow an answer, or one to rely on; empty where there is one."""
        same_steps = "train.max_steps with many train.epochs gives all shares the same"
        match self.answer:
            case "needs" | "reached" if self.checked and self.checked.is_inside is False and not self.max_steps:
                return f"let smaller shares, which have fewer steps, train as long ({same_steps}): see check"
            case "nothing learned":
                return (
                    f"train longer, above all smaller shares, which have fewer steps ({same_steps}), or take larger "
                    "--shares"
                )
            case "flat":
                return "ask more validation questions (data.validation_fraction, evaluate.max_samples), or train longer"
            case "above the ceiling" | "too far":
                return "ask for a lower --goal; other data, a larger model or longer training may reach this one"
            case "too few images":
                return "hold more images out (data.validation_fraction)"
            case "too few points":
                return "take more --shares; see the errors of those without a score"
        return ""

    @property
    def length(self) -> str:
        """A sentence on how long the trainings of shares are."""
        epochs = f"each training has {'at most ' if self.max_steps else ''}{self.epochs:,} epochs of its share"
        if not self.max_steps:
            return f"{epochs}, a smaller share fewer steps"
        return f"{epochs} and at most {self.max_steps:,} steps (train.max_steps): smaller shares may have more epochs"

    @property
    def gain(self) -> str:
        """A sentence on the gain of further samples; empty without a law."""
        if self.visible is None or self.noise_from is None:
            return ""
        noise = f"nothing is seen above noise ({100 * self.visible:.1f} points on {self.questions:,} questions)"
        if self.noise_from > 10 * self.samples:
            return f"at 10 times the samples there is still more to gain than noise ({100 * self.visible:.1f} points)"
        return f"beyond about {count(self.noise_from)} samples {noise}"


def percent(share: float) -> str:
    """Such as 95 % or 87.5 %."""
    return f"{100 * share:.3g} %"


def percents(interval: Between) -> str:
    """Such as 88 to 93 %."""
    high = "100" if interval.high is None else f"{100 * interval.high:.3g}"
    return f"{100 * interval.low:.3g} to {high} %"


def between(interval: Between) -> str:
    """Numbers of samples such as 4,200 (2,900 to 8,100)."""
    if interval.high is None:
        return f"{count(interval.value)} (at least {count(interval.low)})"
    return f"{count(interval.value)} ({count(interval.low)} to {count(interval.high)})"


def count(samples: float) -> str:
    """A number of samples, to two digits where it is not known better."""
    digits = max(0, len(f"{round(samples)}") - 2)
    return f"{round(samples, -digits):,.0f}"
