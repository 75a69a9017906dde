"""Block-diagonal attention mask for packed samples, built on the device without synchronizing with the host.

transformers builds the same mask from positions that restart, but first reads from the device whether any sequence
holds more than one sample. The host knows that already.
"""

from __future__ import annotations

from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import no_mask, sees_all_before, shares_prefixes, takes_samples


def block_diagonal_mask(config: object, position_ids: Tensor, samples: CuSeqlens | None) -> dict[str, object]:
    """Inputs of a language model with this config that separate packed samples.

    position_ids: see `mask_of`. samples: their bounds, where known. Raises NotImplementedError for shared prefixes in
    a model that keeps samples apart by positions, which go on from a prefix to its branches.
    """
    if samples is not None and samples.prefixes is not None and not shares_prefixes(config):
        raise NotImplementedError("samples that share a prefix cannot be kept apart by their positions")
    if samples is not None and takes_samples(config):
        return {"attention_mask": no_mask(len(position_ids), position_ids.device), "samples": samples}
    return {"attention_mask": mask_of(config, position_ids, packed=samples is None or samples.packed)}


def mask_of(config: object, position_ids: Tensor, *, packed: bool) -> Tensor | None:
    """(sequences, 1, tokens, tokens), true where a token sees another: itself, or an earlier one of its sample.

    config: the language model's. position_ids: (sequences, tokens), restarting for each sample. None leaves the mask to
    transformers: one sample a sequence needs none, and other kinds of attention need other masks.
    """
    if not packed or not sees_all_before(config):
        return None
    return same_sample(position_ids).tril()


def same_sample(position_ids: Tensor) -> Tensor:
    """(sequences, 1, tokens, tokens), true where two tokens are of one sample."""
    sample = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    return (sample[:, :, None] == sample[:, None, :]).unsqueeze(1)
