"""Greedy answers to questions about images, batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from vlmpipe.trainer.data.chat.encode import Chat

END_OF_THINKING = "</think>"
GenerationInputs = Callable[[Tensor], dict[str, Any]]  # prompts' tokens -> the model's arguments


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer, and why it ends, as OpenAI's API says it: at an end token, or where no more tokens are allowed."""

    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """Answers to a batch of prompts, and the logits of their first tokens: (prompts, vocabulary), in fp32."""

    answers: list[GeneratedAnswer]
    first_logits: Tensor


class FirstLogits(LogitsProcessor):
    """Keeps the first logits only: those of all tokens of long answers would not fit."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, _tokens: Tensor, logits: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = logits
        return logits


@torch.inference_mode()
def generate_answers(
    model: nn.Module,
    chat: Chat,
    prompts: Sequence[list[int]],
    inputs: GenerationInputs,
    device: torch.device,
    *,
    max_new_tokens: int,
) -> Generation:
    """Continue each prompt greedily to an end token.

    `inputs` turns the prompts' tokens into the model's arguments. Prompts are padded
    on the left, so that all answers start at the same position.
    """
    input_ids, attention_mask = (tensor.to(device) for tensor in left_padded(prompts, chat.tokenizer.pad_token_id))
    return generate(model, chat, {"attention_mask": attention_mask, **inputs(input_ids)}, max_new_tokens)


def generate(model: nn.Module, chat: Chat, inputs: dict[str, Any], max_new_tokens: int) -> Generation:
    """Greedy answers to what the arguments of the model's `generate` hold."""
    first = FirstLogits()
    generated = model.generate(
        **inputs,
        logits_processor=LogitsProcessorList([first]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=chat.tokenizer.pad_token_id,
        eos_token_id=chat.end_token_ids,
    )
    if "input_ids" in inputs:
        generated = generated[:, inputs["input_ids"].shape[1] :]  # remove the prompts, which precede the answers
    # After thinking, where the template has it.
    texts = chat.tokenizer.batch_decode(generated, skip_special_tokens=True)
    ended = torch.isin(generated, torch.tensor(chat.end_token_ids, device=generated.device)).any(dim=1).tolist()
    answers = [
        GeneratedAnswer(text.rpartition(END_OF_THINKING)[2].strip(), "stop" if end else "length")
        for text, end in zip(texts, ended, strict=True)
    ]
    assert first.kept is not None
    return Generation(answers, first.kept)


def left_padded(prompts: Sequence[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of prompts, (prompts, tokens), which end together."""
    longest = max(len(ids) for ids in prompts)
    input_ids = torch.full((len(prompts), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    return input_ids, attention_mask
