"""Tokens and labels of samples in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from vlmpipe.cli.views.tables import show, standard_output

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prepare.inspect import InspectedSample, Piece

LABEL, IMAGE, PROMPT = "bold green", "cyan", "dim"


def print_samples(samples: Sequence[InspectedSample]) -> None:
    """Each sample's text; labels between brackets too, for terminals without colour."""
    printer = standard_output()
    if not samples:
        show(printer, "the source has no such samples")
    for sample in samples:
        labels = sum(piece.tokens for piece in sample.pieces if piece.is_label)
        head = sample.rejected or f"{len(sample.encoded.input_ids)} tokens, {labels} of them labels"
        if lost := "".join(dict.fromkeys(sample.encoded.lost)):
            head += f"; the tokenizer has no token for {lost!r}"
        show(printer, Text.assemble((f"{sample.id}  ", "bold"), f"{sample.where}: ", head))
        printer.print(Text.assemble(*map(_shown, sample.pieces)), soft_wrap=True)


def _shown(piece: Piece) -> tuple[str, str]:
    if piece.is_image:
        return f"{piece.text} x {piece.tokens}", IMAGE
    return (f"[{piece.text}]", LABEL) if piece.is_label else (piece.text, PROMPT)
