"""Head and loss, forward and backward: all logits at once beside chunks of label tokens, in one thread.

python -m benchmarks.loss_chunks [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import interleaved_work, options
from trainer.models.layers.chunked_loss import TokenLoss, compute_in_chunks

LABELS, WIDTH, VOCABULARY = 2048, 512, 32_000
CHUNKS = (2048, 1024, 512, 256)
AT_ONCE = "at once"


def main() -> None:
    arguments = options(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = LABELS // 8 if arguments.quick else LABELS
    sides = {AT_ONCE: _side(labels, 0)} | {f"chunks of {size}": _side(labels, size) for size in CHUNKS}
    rounds = interleaved_work(sides, arguments.rounds or (1 if arguments.quick else 7))
    for name, measured in rounds.items():
        ratios = [mine.cpu_s / other.cpu_s for mine, other in zip(measured, rounds[AT_ONCE], strict=True)]
        seconds = statistics.median(one.cpu_s for one in measured)
        print(f"{name:>15}: {seconds:.3f} CPU s, {statistics.median(ratios):.2f} of all at once")


def _side(labels: int, chunk_tokens: int) -> Callable[[], float]:
    hidden = torch.randn(labels, WIDTH).requires_grad_()
    label_ids = torch.randint(0, VOCABULARY, (labels,))
    head, loss = nn.Linear(WIDTH, VOCABULARY, bias=False), TokenLoss()
    if chunk_tokens:
        compute_in_chunks(loss, head, chunk_tokens)

    def run() -> float:
        loss(head, hidden, label_ids).backward()
        return 1.0

    return run


if __name__ == "__main__":
    main()
