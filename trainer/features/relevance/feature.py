"""Hooks of relevance. Rooms are imported on use: the planner asks for the family alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.hooks.feature import Feature, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vlmpipe.trainer.data.sample import Turn
    from vlmpipe.trainer.evaluation.answer import AnsweringModel, ShownImages

CENTRE_SEQUENCES = 16  # packed sequences whose questions give their mean, on every rank the same


class Relevance(Feature):
    """Selects the visual tokens that a question is about (`model.relevance`). An `Examiner` of the evaluation."""

    family = ("vlmpipe.trainer.features.relevance.family", "ArrCocFamily")  # over a Qwen-VL family
    part = "relevance"
    measures, maps_file = "relevance", "relevance_maps.json"

    def fill_from_data(
        self, model: nn.Module, deferred: Weights | None, first: Callable[[int], Sequence[Any]]
    ) -> Weights | None:
        """Set the centre of questions, where relevance learns from questions and has not seen any."""
        from vlmpipe.trainer.features.relevance.question_centre import centre_questions, lacks_centre

        if not lacks_centre(model, deferred):
            return deferred
        return centre_questions(model, deferred, first(CENTRE_SEQUENCES))

    def save_part(self, part: nn.Module, read: Callable[[str], Tensor], folder: Path) -> None:
        from vlmpipe.trainer.features.relevance.module import RelevanceModule, save_relevance

        assert isinstance(part, RelevanceModule)
        save_relevance(part, read, folder)

    def controls(self, model: ModelConfig) -> tuple[str, ...]:
        from vlmpipe.trainer.features.relevance.selected_tokens import selection_controls

        return selection_controls(model.relevance)

    def under_control(self, model: nn.Module, control: str) -> contextlib.AbstractContextManager[None]:
        from vlmpipe.trainer.features.relevance.selected_tokens import selecting

        return selecting(model, control)

    def records(
        self,
        job: JobConfig,
        model: AnsweringModel,
        turns: Sequence[Turn],
        images: Sequence[ShownImages],
        device: torch.device,
    ) -> list[dict[str, Any]]:
        from vlmpipe.trainer.features.relevance.selected_tokens import relevance_records

        return relevance_records(job, model, turns, images, device)

    def summarise(self, records: Sequence[dict[str, Any]], exact_match: float | None) -> dict[str, object]:
        from vlmpipe.trainer.features.relevance.selected_tokens import summarised

        return summarised(records, exact_match)

    def has_map(self, record: dict[str, object]) -> bool:
        return bool(record["relevance"])


FEATURE = Relevance()
