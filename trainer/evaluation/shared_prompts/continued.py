"""Go on from what prompts begin with, after looking at whether the model's code can.

Some models let images see the question: their keys of a prompt's beginning change, in whatever bit, with its end. Some
keep more than keys and values, or count padding into windows: their caches have layers of another kind. Both are looked
for at the first batch, which is also answered in both ways. Where one was found, or the logits of the first answers'
tokens differ by more than rounding, each prompt is computed alone from there on, and that is said.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer, Generation, GenerationInputs, generate, left_padded
from vlmpipe.trainer.evaluation.shared_prompts.groups import PromptGroup

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2}  # of the range of a prompt's logits, by the weights' type
ROUNDING_OF_OTHERS = 5e-2


class NotShareableError(Exception):
    """The model's code cannot go on from the beginning of a prompt."""


@dataclass
class SharedPrompts:
    """State of a model: whether its answers are computed from shared beginnings, None before the first batch."""

    is_equal: bool | None = None

    def answers(
        self, alone: Callable[[], Generation], shared: Callable[[bool], Generation], dtype: torch.dtype
    ) -> list[GeneratedAnswer]:
        """The answers by `shared`, or by `alone` where these are not the same.

        shared: asked with True, looks at the model's code too, and raises NotShareableError. dtype: of the weights.
        """
        if self.is_equal:
            return shared(False).answers
        expected = alone()
        if self.is_equal is None:
            reason = _difference(expected, shared, ROUNDING.get(dtype, ROUNDING_OF_OTHERS))
            self.is_equal = not reason
            if reason:
                text = "questions about the same images are computed one by one, not from their common beginning"
                print(f"{text}: {reason}", file=sys.stderr, flush=True)
        return expected.answers


def _difference(expected: Generation, shared: Callable[[bool], Generation], bound: float) -> str:
    """How the answers from shared beginnings differ; empty where they do not."""
    try:
        made = shared(True).first_logits
    except NotShareableError as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it ends with {type(error).__name__}: {error}"
    logits = expected.first_logits
    scale = (logits.amax(1) - logits.amin(1)).clamp(min=1e-6)
    change = float(((made - logits).abs().amax(1) / scale).max())
    return "" if change <= bound else f"it changes logits by {change:.1g} of their range, more than {bound:g}"


@dataclass(frozen=True)
class Shared:
    """A batch whose groups are continued. inputs: the model's arguments for one prompt of each group, in order.

    images: how many each group has.
    """

    model: nn.Module
    chat: Chat
    prompts: Sequence[list[int]]
    groups: Sequence[PromptGroup]
    inputs: GenerationInputs
    images: Sequence[int]
    device: torch.device

    @torch.inference_mode()
    def generated(self, max_new_tokens: int) -> Generation:
        """Compute what each group begins with once, and continue each prompt from there."""
        beginnings = [self.prompts[group.members.start][: group.tokens] for group in self.groups]
        ids, mask, arguments, cache = self._read(beginnings)
        numbers = [number for number, group in enumerate(self.groups) for _ in group.members]
        chosen = torch.tensor(numbers, device=self.device)
        cache.batch_select_indices(chosen)
        ends = [self.prompts[place][group.tokens :] for group in self.groups for place in group.members]
        more, more_mask = self._padded(ends)
        ids, mask = torch.cat([ids[chosen], more], 1), torch.cat([mask[chosen], more_mask], 1)
        if (body := getattr(self.model, "model", None)) is not None and hasattr(body, "rope_deltas"):
            body.rope_deltas = None  # of the beginnings
        positions = self._positions(arguments, ids, numbers)
        continued = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, **positions}
        return generate(self.model, self.chat, continued, max_new_tokens)

    @torch.inference_mode()
    def require_causal(self) -> None:
        """Read the groups' first prompts twice, with other tokens at their ends.

        Raises NotShareableError where a key or value of a beginning differs, or the cache holds something else.
        """
        firsts = [self.prompts[group.members.start] for group in self.groups]
        ends = [len(prompt) - group.tokens for prompt, group in zip(firsts, self.groups, strict=True)]
        others = [
            [*prompt[: len(prompt) - end], *self._other(prompt[-end:])]
            for prompt, end in zip(firsts, ends, strict=True)
        ]
        caches = [self._read(prompts)[3] for prompts in (firsts, others)]
        longest = max(map(len, firsts))
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            if kind := next((type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer), ""):
                raise NotShareableError(f"a layer's cache is a {kind}")
            for name in ("keys", "values"):
                first, second = (getattr(layer, name) for layer in layers)
                for row, end in enumerate(ends):
                    if not torch.equal(first[row, :, : longest - end], second[row, :, : longest - end]):
                        raise NotShareableError("its images and earlier tokens see the question")

    def _other(self, tokens: Sequence[int]) -> list[int]:
        """Make as many tokens, none of which is the first of these."""
        return [self.chat.end_token_ids[0] if tokens[0] != self.chat.end_token_ids[0] else tokens[0] - 1] * len(tokens)

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        ids, mask = left_padded(prompts, self.chat.tokenizer.pad_token_id)
        return ids.to(self.device), mask.to(self.device)

    def _read(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor, dict[str, object], Cache]:
        """Tokens and mask of a prompt for each group, the model's arguments for them, and its cache after them."""
        ids, mask = self._padded(prompts)
        arguments = {"attention_mask": mask, **self.inputs(ids)}
        model: PreTrainedModel = self.model
        padding = self.chat.tokenizer.pad_token_id
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": padding, "return_dict_in_generate": True}
        return ids, mask, arguments, model.generate(**arguments, **options).past_key_values

    def _positions(self, arguments: Mapping[str, object], ids: Tensor, numbers: Sequence[int]) -> dict[str, object]:
        """Arguments that positions follow from: types of tokens, and grids of the images of each prompt."""
        positions: dict[str, object] = {}
        if self.chat.form.published:
            positions |= self.chat.form.published.types(ids)
        elif "mm_token_type_ids" in arguments:
            positions["mm_token_type_ids"] = (ids == self.chat.image_token_id).int()
        starts = [0, *itertools.accumulate(self.images)]
        rows = [row for number in numbers for row in range(starts[number], starts[number + 1])]
        grids = {
            name: value for name, value in arguments.items() if name.endswith("_grid_thw") and isinstance(value, Tensor)
        }
        return positions | {name: value[rows] for name, value in grids.items()}
