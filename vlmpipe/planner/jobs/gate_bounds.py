"""Bounds of the gate on gain and forgetting that a run's questions are too few to pass, known before it starts.

The gate's test is asked for the best outcome that a model can have. Answers about one image count as one where none of
them differs, or all do: so the numbers here are of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.jobs.hours import CAPTIONS, validation_samples
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.benchmarks.readers import read_benchmark
from vlmpipe.trainer.evaluation.significance.paired import MAX_DEFAULT_MARGIN, PairedCounts, interval, is_above
from vlmpipe.trainer.storage.base import in_bucket

MAX_IMAGES = 1 << 30
MAX_READ_BYTES = 16 << 20  # of a benchmark's file, to count its questions


@dataclass(frozen=True)
class BoundDoubt:
    """Why a bound is hard or impossible to pass. is_certain: no model whatever can pass it."""

    text: str
    is_certain: bool


def bound_doubts(config: RunConfig, load: Workload | None) -> list[BoundDoubt]:
    """The doubts about both bounds; none where the number of questions is not known. Reads files of benchmarks."""
    gate = config.gate
    if gate.bounds == "none":
        return []
    doubts = []
    if gate.max_forgetting is not None and config.evaluate.retention.probe == "auto":
        doubts.append(_forgetting(config, load, gate.max_forgetting))
    if gate.min_gain is not None:
        doubts.append(_gain(config, load, gate.min_gain))
    return [doubt for doubt in doubts if doubt]


def _forgetting(config: RunConfig, load: Workload | None, most: float) -> BoundDoubt | None:
    """A model whose answers are right where the start's are. By agreement none can do better."""
    retention = config.evaluate.retention
    if any(file.format != CAPTIONS for file in config.evaluate.benchmarks):
        asked = _benchmark_images(config)
        return None if asked is None else _too_few(most, asked, 1, "evaluate.benchmarks", is_certain=False)
    samples = _validation_images(config, load)
    is_of_data = samples is not None and samples < retention.max_images
    asked = samples if is_of_data and samples is not None else retention.max_images
    field = "validation images" if is_of_data else "evaluate.retention.max_images"
    is_certain = not is_of_data or bool(load and load.is_prepared)
    return _too_few(most, asked, max(1, len(retention.prompts)), field, is_certain=is_certain)


def _too_few(most: float, images: int, per_image: int, field: str, *, is_certain: bool) -> BoundDoubt | None:
    """The doubt about `per_image` questions about each of these images."""

    def unchanged(count: int) -> PairedCounts:
        return PairedCounts(
            questions=count * per_image, only_model=0, only_other=0, images=count, design_effect=per_image
        )

    if is_above(unchanged(images), -most):
        return None
    low, _ = interval(unchanged(images))
    needed = _smallest(lambda count: is_above(unchanged(count), -most))
    about = (
        f"{images * per_image:,} questions of the probe about {images:,} images"
        if per_image > 1
        else f"{images:,} questions"
    )
    can = "no model can pass" if is_certain else "a model equal to its start cannot pass"
    expected, shown = f"expected {needed:,} images ({field})", _smallest_shown(-low)
    ruled_out = f"rule out a loss of {shown:.3f}, not of {most:g}; {expected}, or a bound of {shown:.3f} or more"
    return BoundDoubt(
        f"gate.max_forgetting {most:g}: {can}. With nothing changed, {about} "
        + (ruled_out if shown <= 1 else f"rule out no loss; {expected}"),
        is_certain,
    )


def _smallest_shown(loss: float) -> float:
    """The smallest number of three decimals above `loss`: a bound that is printed has to pass."""
    return (math.floor(1000 * loss) + 1) / 1000


def _gain(config: RunConfig, load: Workload | None, least: float) -> BoundDoubt | None:
    """A model that is right wherever the start is, too."""
    images = _validation_images(config, load)
    if not images:
        return None

    def gained(count: int, share: float) -> PairedCounts:
        return PairedCounts(questions=count, only_model=round(share * count), only_other=0, images=count)

    where = "evaluate.max_samples" if images == config.evaluate.max_samples else "validation samples"
    if not is_above(gained(images, 1.0), least):
        needed = _smallest(lambda count: is_above(gained(count, 1.0), least))
        is_certain = images == config.evaluate.max_samples or bool(load and load.is_prepared)
        return BoundDoubt(
            f"gate.min_gain {least:g}: no model can pass. With every answer gained, {images:,} images do not show it; "
            f"expected {_or_more(needed, where)}a smaller bound",
            is_certain,
        )
    passing = _smallest(lambda count: is_above(gained(images, count / images), least)) / images
    if passing - least <= MAX_DEFAULT_MARGIN:
        return None
    needed = _smallest(lambda count: is_above(gained(count, least + MAX_DEFAULT_MARGIN), least), first=images)
    return BoundDoubt(
        f"gate.min_gain {least:g}: with {images:,} images only a gain of {passing:.3f} or more passes, where no answer "
        f"is lost; {needed:,} ({where}) pass {least + MAX_DEFAULT_MARGIN:.3f}",
        is_certain=False,
    )


def _or_more(needed: int, where: str) -> str:
    """The number that passes, as one of two ways; nothing where none does."""
    return "" if needed >= MAX_IMAGES else f"{needed:,} ({where}), or "


def _validation_images(config: RunConfig, load: Workload | None) -> int | None:
    """Upper bound of the images that the validation questions are about: one of each sample; None where not known."""
    samples = validation_samples(config, load) if load else config.evaluate.max_samples
    return min(samples, config.evaluate.max_samples or samples) if samples else None


def _benchmark_images(config: RunConfig) -> int | None:
    """Upper bound of the images of the probe's questions; None where a file's number of questions is not known."""
    total = 0
    for file in config.evaluate.benchmarks:
        if file.format == CAPTIONS:
            continue
        count = file.max_questions
        if not count:
            if in_bucket(file.uri) or not Path(file.uri).is_file() or Path(file.uri).stat().st_size > MAX_READ_BYTES:
                return None
            try:
                count = len(read_benchmark(file, config.data.max_image_bytes))
            except UserError:  # which the check of benchmarks reports
                return None
        total += config.evaluate.retention.benchmark_questions(count)
    return total


def _smallest(passes: Callable[[int], bool], first: int = 1) -> int:
    """The smallest number from `first` on that passes, of which all larger ones pass, too; MAX_IMAGES at most."""
    low, high = first - 1, first
    while high < MAX_IMAGES and not passes(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
