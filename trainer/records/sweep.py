"""Records of a sweep: its trainings and jobs (`sweep.json`), and the outcome of each training (`outcome.json`)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from vlmpipe.trainer.records.record import Part, Record

JOB_STEP = "train-variants"  # the step of a job is this with its number

SHARE = "data.train_share"


class SweepVariant(Part):
    """A variant: dotted fields of the run file with its values."""

    name: str
    values: dict[str, JsonValue] = Field(default_factory=dict)


class Claim(Part):
    """A claim that the comparison answers; `margin` is the amount of the metric by which the variant may be worse."""

    claim: str
    variant: str
    against: tuple[str, ...]
    margin: float = 0.0


class SweepTraining(Part):
    """A training of a variant, which is a run of its own in the sweep's folder.

    data_from, features_from: folders of the trainings that prepare its data and encode its images.
    """

    variant: str
    start: int
    run_uri: str
    data_from: str
    features_from: str

    @property
    def title(self) -> str:
        return f"{self.variant}, start {self.start}"


class Sweep(Record):
    """Trainings of a sweep, dealt out to jobs.

    goal: score that a learning curve asks about. jobs: for each, the indices of its trainings.
    """

    FILE: ClassVar[str] = "sweep.json"
    STEP: ClassVar[str] = "resolve-run"

    metric: str
    baseline: str
    starts: int
    goal: float = 0.95
    parallelism: int
    hypotheses: tuple[Claim, ...] = ()
    variants: tuple[SweepVariant, ...]
    trainings: tuple[SweepTraining, ...]
    jobs: tuple[tuple[int, ...], ...]

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the training samples of each variant, where nothing else differs: a learning curve. Else
        nothing."""
        if any(variant.values.keys() != {SHARE} for variant in self.variants):
            return {}
        shares = [(variant.name, variant.values[SHARE]) for variant in self.variants]
        return {name: float(share) for name, share in shares if isinstance(share, int | float)}


class Outcome(Record):
    """How a training of a sweep ended, in that training's folder. Times in seconds.

    skipped: a further start of a share whose first start is at the majority baseline; `error` says so. settings: digest
    of what its scores depend on. submission: of the run, which trained it.
    """

    FILE: ClassVar[str] = "outcome.json"
    STEP: ClassVar[str] = "train-variants"
    IS_SPARSE: ClassVar[bool] = True

    state: Literal["done", "failed", "skipped"]
    exit_code: int = 0
    error: str = ""
    settings: str = ""
    submission: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0
    train_s: float = 0.0
    export_s: float = 0.0
    evaluate_s: float = 0.0


class FeaturesError(Record):
    """Why the images of a training's data could not be encoded."""

    FILE: ClassVar[str] = "features_error.json"
    STEP: ClassVar[str] = "cache-features"

    error: str
