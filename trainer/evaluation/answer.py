"""Greedy answers of the exported model to questions about images, wherever the images come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.prepare.validation.checks import check_image, check_turns
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer, Generation, GenerationInputs, generate_answers
from vlmpipe.trainer.evaluation.shared_prompts.continued import Shared, SharedPrompts
from vlmpipe.trainer.evaluation.shared_prompts.groups import prompt_groups
from vlmpipe.trainer.feature_cache.encode import encode_images
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.image_inputs import join_features
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import sample_image_tokens
from vlmpipe.trainer.sizing.image_grids import VideoSize

GREY = 1e-6  # nearly a mean pixel; images of zeros are padding to some models


@dataclass(frozen=True)
class AnsweringModel:
    """An exported model on this rank's device, and the chat template that it is asked in."""

    family: Family
    model: nn.Module
    chat: Chat
    features: FeatureReader | None  # None: the tower runs for all images
    budget: BatchBudget
    shared: SharedPrompts = field(default_factory=SharedPrompts)


@dataclass(frozen=True)
class ShownImages:
    """The images that a question is asked about, as data preparation stores them.

    counts: tokens of each; sizes: (width, height) in pixels.
    """

    counts: Sequence[int]
    sizes: Sequence[tuple[int, int]]
    sha256: Sequence[str]
    read: Callable[[], Sequence[bytes]]
    are_cached: bool  # their features are in the cache, where there is one
    signatures: Sequence[bytes] = ()  # `image_signature` of each, where they were decoded just now


@dataclass(frozen=True)
class Asked:
    """A question. `prompted` are the images that its prompt is written for, `shown` those that the model sees.

    earlier: turns before it, with the answers that the model is to take for its own.
    """

    turn: Turn
    prompted: ShownImages
    shown: ShownImages
    earlier: Sequence[Turn] = ()


def ask_about(job: JobConfig, chat: Chat, question: str, image: bytes, what: str, *, system: str = "") -> Asked:
    """A question about an image of any origin, after a system text, checked as data preparation checks samples.

    Raises DataError, which names the question by `what`.
    """
    turn = Turn(f"{IMAGE_TOKEN}\n{question}", "-", system=system)  # an answer that is not asked about
    try:
        check_turns((turn,), 1, chat.control_tokens)
        checked = check_image(image, job.data, name=what)
        sizes = [(checked.width, checked.height)]
        counts = sample_image_tokens(job.model)(sizes)
        if system:  # which the chat template may refuse
            chat.prompt(turn, counts, sizes)
    except (RejectedError, ValueError) as error:
        raise DataError(
            f"{what}: {error}",
            expected="a question that can be asked",
            fix="correct the file or its image; the section data has the limits of images",
        ) from error
    shown = ShownImages(
        counts, sizes, [checked.sha256], lambda: [checked.data], are_cached=False, signatures=[checked.signature]
    )
    return Asked(turn, shown, shown)


def answer_questions(
    job: JobConfig,
    model: AnsweringModel,
    questions: Sequence[Asked],
    device: torch.device,
    *,
    max_new_tokens: int,
    is_blank: bool = False,
) -> list[GeneratedAnswer]:
    """The model's answers, as many at once as its budget allows. is_blank: without what is in the images.

    What consecutive questions about the same images begin with is computed once, where the model can.
    """
    chat = model.chat
    prompts = [
        chat.prompt(asked.turn, asked.prompted.counts, asked.prompted.sizes, asked.earlier) for asked in questions
    ]
    made = published_inputs if chat.form.published else encoded_inputs

    def inputs(shown: Sequence[ShownImages]) -> GenerationInputs:
        return made(job, model, shown, device, is_blank=is_blank)

    def answer(batch: slice) -> Sequence[GeneratedAnswer]:
        asked, shown = prompts[batch], [question.shown for question in questions[batch]]

        def alone() -> Generation:
            return generate_answers(model.model, chat, asked, inputs(shown), device, max_new_tokens=max_new_tokens)

        sets = [(tuple(images.sha256), tuple(map(tuple, images.sizes))) for images in shown]
        groups = prompt_groups(asked, sets, chat.vision_token_ids)
        has_video = any(isinstance(size, VideoSize) for images in shown for size in images.sizes)
        # A selection takes image tokens by the question; grids of videos are not in the order of what is shown.
        if len(groups) == len(asked) or chat.form.selects or has_video:
            return alone().answers
        firsts = [shown[group.members.start] for group in groups]

        def together(is_first: bool) -> Generation:
            counts = [len(images.counts) for images in firsts]
            batch = Shared(model.model, chat, asked, groups, inputs(firsts), counts, device)
            if is_first:
                batch.require_causal()
            return batch.generated(max_new_tokens)

        return model.shared.answers(alone, together, next(model.model.parameters()).dtype)

    tokens = [len(prompt) + max_new_tokens for prompt in prompts]
    return model.budget.answered(tokens, [len(asked.shown.counts) for asked in questions], answer)


def encoded_inputs(
    job: JobConfig, model: AnsweringModel, shown: Sequence[ShownImages], device: torch.device, *, is_blank: bool
) -> GenerationInputs:
    """The model's arguments for prompts about these images."""
    form, features = model.chat.form, image_features(job, model, shown, device)
    if is_blank:
        features = torch.zeros_like(features)
    sizes, grids = [size for images in shown for size in images.sizes], None
    if form.grids:
        grids = torch.tensor([form.grids.grid(size) for size in sizes], device=device).reshape(-1, 3)
    with torch.inference_mode():
        projected = model.family.project(model.model, features)

    def inputs(input_ids: Tensor) -> dict[str, object]:
        prepared = model.family.generation_inputs(model.model, input_ids, projected, grids)
        for feature in features_of(job):
            prepared = feature.generation_inputs(model.model, prepared, projected, sizes)
        return prepared

    return inputs


def published_inputs(
    job: JobConfig, model: AnsweringModel, shown: Sequence[ShownImages], device: torch.device, *, is_blank: bool
) -> GenerationInputs:
    """Return generation inputs for family hf, whose models encode images themselves. A blank image is mean grey."""
    published = model.chat.form.published
    assert published is not None
    of_each = [images.read() for images in shown]
    images = image_preparer(job.model)([image for images in of_each for image in images], list(map(len, of_each)))
    values = images.to(device).values
    assert not isinstance(values, Tensor)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if is_blank and tensors:
        tensors["pixel_values"] = torch.full_like(tensors["pixel_values"], GREY)
    if job.train.precision == "bf16":  # as its weights
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
    return lambda input_ids: {"input_ids": input_ids, **published.types(input_ids), **tensors}


def image_features(job: JobConfig, model: AnsweringModel, shown: Sequence[ShownImages], device: torch.device) -> Tensor:
    """Features of all these images, in order. Each distinct image is read and encoded once.

    Rounded to bf16 where training rounds them: those of a frozen tower. A server in fp32 rounds none.
    """
    features: dict[str, Tensor] = {}
    encoded: dict[str, bytes] = {}
    for images in shown:
        if model.features and images.are_cached:
            features |= {sha256: model.features.read(sha256) for sha256 in images.sha256}
        elif not encoded.keys() >= set(images.sha256):
            encoded |= dict(zip(images.sha256, images.read(), strict=True))
    tower = model.family.tower(model.model)
    dtype = torch.bfloat16 if "tower" in job.model.freeze else next(tower.parameters()).dtype
    for batch in encode_images(job, tower, list(encoded), encoded.__getitem__, device, dtype):
        features |= batch
    order = [sha256 for images in shown for sha256 in images.sha256]
    shape = model.family.feature_shape(job.model)
    return join_features([features[sha256] for sha256 in order], shape).to(device)
