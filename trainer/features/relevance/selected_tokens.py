"""Measures of a model's selected visual tokens: how many, whether they are those that the answer is about, and whether
they depend on the question."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.answer import AnsweringModel, ShownImages, image_features
from vlmpipe.trainer.evaluation.generate import left_padded
from vlmpipe.trainer.features.relevance.allocation import Kept
from vlmpipe.trainer.features.relevance.generation import relevance_of_prompts
from vlmpipe.trainer.features.relevance.module import RelevanceModule, untrained

EXAMPLES = 12  # relevance maps of a rank
# Selections beside the model's own that answers are compared with.
CONTROLS: dict[str, dict[str, object]] = {
    "all_tokens": {"allocation": "full", "estimator": "none", "max_tokens": None, "min_tokens": None},
    "uniform_tokens": {"allocation": "uniform", "estimator": "none", "min_tokens": None},
}
Region = tuple[float, ...]


def selection_controls(relevance: RelevanceConfig | None) -> tuple[str, ...]:
    """The controls of a model's selection; none where it keeps all tokens, and so has no number to keep otherwise."""
    return () if relevance is None or relevance.allocation == "full" else tuple(CONTROLS)


@dataclass(frozen=True)
class Selected:
    """The selection of one question's images: for each what was kept, and all tokens' relevance."""

    kept: list[Kept]
    relevance: list[list[float]]
    balance: list[float]  # weights of the scorers, then the three tensions; of the first image

    @property
    def tokens(self) -> int:
        return sum(map(len, self.kept))


def selections(
    job: JobConfig, model: AnsweringModel, turns: Sequence[Turn], images: Sequence[ShownImages], device: torch.device
) -> list[Selected]:
    """Tokens that these questions keep of their images, without answering them."""
    form = model.chat.form
    assert form.grids is not None
    prompts = [model.chat.prompt(turn, shown.counts, shown.sizes) for turn, shown in zip(turns, images, strict=True)]
    input_ids, _ = left_padded(prompts, model.chat.tokenizer.pad_token_id)
    sizes = [size for shown in images for size in shown.sizes]
    grids = torch.tensor([(1, *form.grids.of(*size)) for size in sizes]).reshape(-1, 3)
    textures = image_features(job, model, images, device)[:, -len(CHANNELS) :].float()
    with torch.inference_mode():
        relevances = iter(relevance_of_prompts(model.model, input_ids.to(device), textures, grids))
        return [
            Selected(
                [selection.kept for selection in of_images],
                [[round(value, 3) for value in selection.found.relevance.tolist()] for selection in of_images],
                [
                    round(float(value), 4)
                    for selection in of_images[:1]
                    for part in selection.found.balance
                    for value in part.view(-1)
                ],
            )
            for of_images in ([next(relevances) for _ in shown.counts] for shown in images)
        ]


def target_kept(selected: Selected, region: Region) -> float | None:
    """Share of the tokens about `region` that are kept as tokens of their own; None for another number of images."""
    if not region or len(selected.kept) != 1:
        return None
    (selection,) = selected.kept
    requested = tokens_in(region, selection.grid)
    cells = {(row, column) for row, column, height, width in selection.cells.tolist() if height == width == 1}
    return len(requested & cells) / len(requested) if requested else None


def tokens_in(region: Region, grid: tuple[int, int]) -> set[tuple[int, int]]:
    """Rows and columns of tokens of which at least half lies in the region."""
    left, top, right, bottom = region
    rows, columns = grid

    def share(low: float, high: float, place: int, count: int) -> float:
        return max(0.0, min(high, (place + 1) / count) - max(low, place / count)) * count

    return {
        (row, column)
        for row in range(rows)
        for column in range(columns)
        if share(top, bottom, row, rows) * share(left, right, column, columns) >= 0.5 - 1e-6
    }


def sensitivity(these: Selected, other: Selected) -> float:
    """1 - IoU of two selections of the same images: 0 where the question changes nothing."""
    first, second = (
        {(n, *cell) for n, selection in enumerate(made.kept) for cell in selection.cells.tolist()}
        for made in (these, other)
    )
    return 1 - len(first & second) / len(first | second) if first | second else 0.0


@contextlib.contextmanager
def selecting(model: Any, control: str) -> Iterator[None]:
    """Another selection in place of the model's own, for a control of CONTROLS; none for other controls."""
    module: RelevanceModule | None = getattr(model, "relevance", None)
    if module is None or control not in CONTROLS:
        yield
        return
    changed = module.config.model_copy(update=CONTROLS[control])
    other = RelevanceModule(changed, module.question_width, module.special_ids)
    other.load_state_dict(module.state_dict())
    model.relevance = other.to(model.device)
    try:
        yield
    finally:
        model.relevance = module


def relevance_records(
    job: JobConfig, model: AnsweringModel, turns: Sequence[Turn], images: Sequence[ShownImages], device: torch.device
) -> list[dict[str, object]]:
    """Return what `summarised` needs about each question, as plain JSON."""
    module: RelevanceModule = model.model.relevance
    questions = [_on_images(turn, len(shown.counts)) for turn, shown in zip(turns, images, strict=True)]
    # Another question about the same images: a distant one's, of which the text differs.
    half = len(questions) // 2
    others = [
        next((q for q in questions[n + half :] + questions[: n + half] if q != question), question)
        for n, question in enumerate(questions)
    ]
    made = selections(job, model, questions, images, device)
    asked_otherwise = selections(job, model, others, images, device)
    model.model.relevance = untrained(module, job.model.seed).to(device)
    before = selections(job, model, questions, images, device)
    model.model.relevance = module
    return [
        {
            "tokens": selected.tokens,
            "all_tokens": sum(map(len, selected.relevance)),
            "images": len(selected.kept),
            "sensitivity": sensitivity(selected, other),
            "target_kept": target_kept(selected, turn.region),
            "target_kept_untrained": target_kept(first, turn.region),
            "sha256": list(shown.sha256),
            "grids": [selection.grid for selection in selected.kept],
            "cells": [selection.cells.tolist() for selection in selected.kept],
            "relevance": selected.relevance if number < EXAMPLES and selected.kept else [],
            "balance": selected.balance,
        }
        for number, (selected, other, first, turn, shown) in enumerate(
            zip(made, asked_otherwise, before, turns, images, strict=True)
        )
    ]


def summarised(records: Sequence[dict[str, Any]], exact_match: float | None) -> dict[str, object]:
    """Means over questions, and some relevance maps."""
    images = sum(record["images"] for record in records)
    mean_tokens = sum(record["tokens"] for record in records) / images if images else None
    balances = [record["balance"] for record in records if record["balance"]]  # a question without an image has none
    return {
        "mean_image_tokens": mean_tokens,
        "all_image_tokens": sum(record["all_tokens"] for record in records) / images if images else None,
        "exact_match_per_token": exact_match / mean_tokens if exact_match is not None and mean_tokens else None,
        "query_sensitivity": _mean(record["sensitivity"] for record in records),
        "target_kept": _mean(record["target_kept"] for record in records),
        "target_kept_untrained": _mean(record["target_kept_untrained"] for record in records),
        "balance": [_mean(values) for values in zip(*balances, strict=True)],
    }


def _on_images(turn: Turn, images: int) -> Turn:
    """Return the question without an answer, with `images` image tokens before it."""
    text = turn.question.replace(f"{IMAGE_TOKEN}\n", "").replace(IMAGE_TOKEN, "").strip()
    return Turn(f"{IMAGE_TOKEN}\n" * images + text, "", system=turn.system)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
