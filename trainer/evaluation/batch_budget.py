"""How many questions are answered at once: bounded by tokens and images, and halved where memory does not suffice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from vlmpipe.trainer.evaluation.questions_at_once import MAX_IMAGES

T = TypeVar("T")


@dataclass
class BatchBudget:
    """Bounds of one batch of answers. `tokens` shrinks with each out-of-memory, for the rest of the job.

    tokens: of prompts and answers, padded to the longest.
    """

    tokens: int
    images: int = MAX_IMAGES
    out_of_memory: int = 0

    def batches(self, tokens: Sequence[int], images: Sequence[int]) -> list[slice]:
        """Runs of questions within the bounds, in order; at least one question each."""
        slices, start, longest, shown = list[slice](), 0, 0, 0
        for place, (length, count) in enumerate(zip(tokens, images, strict=True)):
            longest, shown = max(longest, length), shown + count
            if place > start and (longest * (place + 1 - start) > self.tokens or shown > self.images):
                slices.append(slice(start, place))
                start, longest, shown = place, length, count
        return [*slices, slice(start, len(tokens))] if tokens else []

    def answered(self, tokens: Sequence[int], images: Sequence[int], answer: Callable[[slice], Sequence[T]]) -> list[T]:
        """The results of `answer` for all questions, called with runs of them.

        Raises torch.OutOfMemoryError where one question alone does not fit.
        """
        answers: list[T] = []
        waiting = self.batches(tokens, images)[::-1]
        while waiting:
            batch = waiting.pop()
            try:
                answers += answer(batch)
                continue
            except torch.OutOfMemoryError:
                if batch.stop - batch.start == 1:
                    raise
            # Outside of the handler, whose traceback holds the tensors of the attempt.
            self._halve(max(tokens[batch]) * (batch.stop - batch.start))
            rest = slice(batch.start, batch.stop)
            again = self.batches(tokens[rest], images[rest])
            waiting += [slice(part.start + rest.start, part.stop + rest.start) for part in again][::-1]
        return answers

    def _halve(self, tried: int) -> None:
        self.out_of_memory += 1
        self.tokens = min(self.tokens, tried) // 2
        torch.cuda.empty_cache()
        print(
            f"out of memory with {tried:,} tokens of questions at once: {self.tokens:,} from here on "
            "(evaluate.batch_tokens)",
            file=sys.stderr,
            flush=True,
        )
