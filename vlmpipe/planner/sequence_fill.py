"""How full packed sequences are at other lengths that need no more memory, by the packer of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.config.run_config import RunConfig

if TYPE_CHECKING:
    from vlmpipe.trainer.data.shards.index import SplitIndex

MAX_SAMPLES = 1 << 16  # packed at each length: a tenth of a second
MAX_HALVINGS = 2
WORTH_A_CHANGE = 0.01  # of the computed tokens


@dataclass(frozen=True)
class LengthFill:
    """A sequence length, and batches with as many tokens in a micro-batch and in a step as the run file's."""

    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    fill: float  # share of the tokens that are not padding


def fill_by_length(config: RunConfig, split: SplitIndex) -> tuple[LengthFill, ...]:
    """Return packing efficiency at the run file's sequence length, at its doubles, and at its halves that hold every
    sample.

    Packs the first epoch, of at most MAX_SAMPLES samples. Empty without packing.
    """
    from vlmpipe.trainer.data.packing import plan_packing

    tokens, shown = split.tokens[:MAX_SAMPLES], split.shown()[:MAX_SAMPLES]
    if not config.data.pack or not len(tokens):
        return ()
    fills = []
    for length, micro, sequences in _candidates(config, int(tokens.max())):
        packed = plan_packing(
            tokens,
            shown,
            sequence_length=length,
            max_images_per_sequence=config.data.max_images_per_sequence,
            seed=config.train.seed,
            epoch=0,
            shards=split.shard_numbers[:MAX_SAMPLES],
            shuffle_shards=config.data.shuffle_shards,
        )
        fills.append(LengthFill(length, micro, sequences, packed.fill))
    return tuple(fills)


def length_advice(fills: Sequence[LengthFill], config: RunConfig) -> str:
    """The fills, and what to set where another length computes clearly fewer tokens; "" where lengths are not known."""
    if not fills:
        return ""
    text = "Fill by data.sequence_length: " + ", ".join(f"{fill.sequence_length:,} {fill.fill:.1%}" for fill in fills)
    now = next(fill.fill for fill in fills if fill.sequence_length == config.data.sequence_length)
    best = max(fills, key=lambda fill: (round(fill.fill, 3), -fill.sequence_length))
    if best.fill < (1 + WORTH_A_CHANGE) * now:
        return text + "."
    return (
        f"{text}. data.sequence_length={best.sequence_length} train.micro_batch_size={best.micro_batch_size} "
        f"train.global_batch_size={best.global_batch_size} computes {1 - now / best.fill:.1%} fewer tokens an epoch, "
        "with as many in a micro-batch and in a step."
    )


def _candidates(config: RunConfig, longest: int) -> Iterator[tuple[int, int, int]]:
    """Length, micro-batch size and global batch size, the shortest length first."""
    length, micro, sequences = (
        config.data.sequence_length,
        config.train.micro_batch_size,
        config.train.global_batch_size,
    )
    halvings = [n for n in range(MAX_HALVINGS, 0, -1) if length % 2**n == 0 and length >> n >= longest]
    yield from ((length >> n, micro << n, sequences << n) for n in halvings)
    yield length, micro, sequences
    while micro % 2 == 0 and sequences % 2 == 0:
        length, micro, sequences = 2 * length, micro // 2, sequences // 2
        yield length, micro, sequences
