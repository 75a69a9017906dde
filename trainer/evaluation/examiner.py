"""Features that examine a model's answers further than by their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.answer import AnsweringModel, ShownImages
from vlmpipe.trainer.hooks.features import features_of


@runtime_checkable
class Examiner(Protocol):
    """A feature with records of each question. A hook beside those of `vlmpipe.trainer.hooks.feature.Feature`."""

    measures: str  # key of the summary in evaluate.json
    maps_file: str  # beside evaluate.json

    def records(
        self,
        job: JobConfig,
        model: AnsweringModel,
        turns: Sequence[Turn],
        images: Sequence[ShownImages],
        device: torch.device,
    ) -> list[dict[str, object]]:
        """Return what `summarise` and `maps` need of each question, as plain JSON."""
        ...

    def summarise(self, records: Sequence[dict[str, object]], exact_match: float | None) -> dict[str, object]:
        """Return means over questions."""
        ...

    def has_map(self, record: dict[str, object]) -> bool:
        """Return whether the record is written to `maps_file`, as an example."""
        ...


def examiner_of(job: JobConfig) -> Examiner | None:
    """The run's examiner; None where no feature is one."""
    return next((feature for feature in features_of(job) if isinstance(feature, Examiner)), None)
