"""The run file's `sweep`: variants of the run that are trained beside each other and compared."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vlmpipe.config.overrides import leaves
from vlmpipe.trainer.config.base import Fraction, Positive, Section
from vlmpipe.trainer.records.sweep import SHARE

Metric = Literal["exact_match", "vqa_accuracy", "anls"]
VariantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._+-]{0,61}[a-z0-9])?$")]
MAX_TRAININGS = 1000
LONGEST_NAME = 63
# Sections, and fields of cluster, that decide nothing about a variant's model or how long it takes.
WITHOUT_EFFECT = (
    "version", "name", "output", "secrets", "gate", "register", "deploy", "schedule", "tune", "notify", "plan", "gcp",
    "kubeflow", "stages",
)  # fmt: skip


class HypothesisConfig(Section):
    """A claim that the comparison answers: one variant is better than others, or at least not worse."""

    claim: str = Field(min_length=1, description="The claim in a sentence, for the report.")
    variant: str = Field(description="Variant that the claim is about.")
    against: tuple[str, ...] = Field(
        min_length=1, description="Variants to compare with; the claim must hold against every one of them."
    )
    margin: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Amount of the metric by which the variant may be worse; 0 claims that it is better.",
    )


class SweepConfig(Section):
    """Variants of the run file, each trained from several random starts."""

    grid: dict[str, tuple[object, ...]] = Field(
        default_factory=dict,
        description="Dotted fields of the run file, each with its values: every combination is a variant.",
    )
    variants: dict[VariantName, dict[str, object]] = Field(
        default_factory=dict,
        description="Named variants: dotted fields and their values. With grid too, each is combined with every point.",
    )
    baseline: str = Field("", description="Variant that all others are compared with; empty takes the first.")
    starts: Positive = Field(
        3,
        description="Trainings of each variant, with train.seed and model.seed raised by 0, 1, 2 and so on; with "
        "train.seed alone in a sweep over data.train_share alone.",
    )
    metric: Metric = Field("exact_match", description="Score of each answer by which variants are compared.")
    goal: Fraction = Field(
        0.95,
        description="Score for which a learning curve, a sweep over data.train_share alone, says how many samples it "
        "needs.",
    )
    parallelism: Positive = Field(2, description="Most jobs that run at the same time.")
    trainings_per_job: Positive = Field(
        1,
        description="Trainings that one job does one after the other, on a machine that starts once.",
    )
    hypotheses: tuple[HypothesisConfig, ...] = Field((), description="Claims that the comparison answers.")

    @property
    def is_curve(self) -> bool:
        """Return whether variants differ by their share of the training samples alone."""
        return all(variant.values.keys() == {SHARE} for variant in variants_of(self))


@dataclass(frozen=True)
class Variant:
    """A variant's name, and the dotted fields of the run file that it replaces."""

    name: str
    values: dict[str, object]


def variants_of(sweep: SweepConfig) -> list[Variant]:
    """All variants, in the run file's order. Names of grid points are made of fields and values."""
    named = [Variant(name, dict(values)) for name, values in sweep.variants.items()] or [Variant("", {})]
    fields = list(sweep.grid)
    numbers = [range(len(sweep.grid[field])) for field in fields]
    variants = []
    for named_values, places in itertools.product(named, itertools.product(*numbers)):
        point = {field: sweep.grid[field][place] for field, place in zip(fields, places, strict=True)}
        parts = [named_values.name] if named_values.name else []
        parts += [_point_name(sweep, field, place) for field, place in zip(fields, places, strict=True)]
        variants.append(Variant("--".join(parts), {**named_values.values, **point}))
    return variants


def hidden_by_sweep(content: Mapping[str, object], fields: Iterable[str]) -> list[str]:
    """Return those dotted `fields` that every variant replaces."""
    sweep = content.get("sweep")
    if not isinstance(sweep, Mapping):
        return []
    grid, variants = (
        {str(k): v for k, v in part.items()} if isinstance(part := sweep.get(name), Mapping) else {}
        for name in ("grid", "variants")
    )
    named = [{path for path, _ in leaves(values)} for values in variants.values() if isinstance(values, Mapping)]
    paths = {*grid, *(set.intersection(*named) if len(named) == len(variants) and named else ())}
    return [field for field in fields if any(f"{field}.".startswith(f"{path}.") for path in paths)]


def baseline_of(sweep: SweepConfig) -> str:
    """The name of the variant that all are compared with."""
    return sweep.baseline or variants_of(sweep)[0].name


def _point_name(sweep: SweepConfig, field: str, place: int) -> str:
    value = sweep.grid[field][place]
    if isinstance(value, Mapping | list | tuple):
        text = str(place + 1)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    last = field.rpartition(".")[2]
    name = re.sub(r"[^a-z0-9._+-]+", "-", f"{last}-{text}".lower()).strip("-._+")
    return name[:LONGEST_NAME]
