"""Where image tokens are in rows, for the library's own code, and that there are as many as images give."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.errors import DataError


def require_tokens(found: int, expected: int | None) -> None:
    """Raise DataError when images give another number of tokens than rows have places for. None: not known."""
    if expected is not None and found != expected:
        raise DataError(
            f"the images of a micro-batch give {found} tokens, and its rows have places for {expected}",
            expected="as many as the prepared data says of these images",
            fix="prepare the data again with this model section, or set features.cache to off",
        )


def count_nowhere(base: nn.Module, *, pairs: bool) -> None:
    """Have the library find image tokens without counting them on the device, for which the host would wait each time.

    The host has counted them already (`require_tokens`). `base` is a library's model below its head, whose hook for
    encoder outputs is used; with `pairs` its method also says where tokens of videos are, of which rows have none.
    """
    image_token = int(base.config.image_token_id)

    def places(input_ids: Tensor, *_: Any, **__: Any) -> Any:
        found = (input_ids == image_token).unsqueeze(-1)
        return (found, found.new_zeros(())) if pairs else found

    base.get_placeholder_mask = places
