"""Attention of a vision encoder with mergers inside images and inside windows, in few launches.

The library calls attention once for each piece of each layer: 2,272 times for one image of a megapixel in Qwen2.5-VL,
whose windows are of 8 x 8 patches. Here torch's variable-length kernel takes all pieces of a layer at once, where the
device has it. Elsewhere neighbouring pieces of one length share a call.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlmpipe.trainer.models.attention.kernel_choice import disagreement, flash_takes
from vlmpipe.trainer.models.hf.encoder import layers_of, mergers_of
from vlmpipe.trainer.models.image_inputs import Grid

NAME = "vlmpipe_flash_by_piece"  # "flash": the library then passes bounds on instead of cutting tensors itself
BOUNDS = "cu_seqlens"  # the library's argument of layers that are told where images end
READ = "_vlmpipe_pieces"  # attribute of bounds that the host has read


@dataclass(frozen=True, eq=False)
class Pieces:
    """Images or windows that one call of a layer's attention keeps apart, known to the host.

    No tuple: module wrappers move the tensors that they find in those.
    """

    runs: tuple[tuple[int, int, int], ...]  # first patch, patches and number of consecutive pieces of one length
    bounds: Tensor  # (pieces + 1,) int32 on the device, for variable-length kernels
    longest: int

    @classmethod
    def of(cls, ends: Iterable[int], device: torch.device) -> Pieces:
        """ends: 0 and the end of each piece, in patches."""
        known = [int(end) for end in ends]
        lengths = [end - start for start, end in itertools.pairwise(known)]
        runs, start = [], 0
        for tokens, pieces in itertools.groupby(lengths):
            count = len(list(pieces))
            if tokens:
                runs.append((start, tokens, count))
            start += tokens * count
        bounds = _moved(torch.tensor(known, dtype=torch.int32), device)
        return cls(tuple(runs), bounds, max(lengths, default=0))


def sizes_of(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, object]:
    """Named arguments of the tower's forward pass for at least one image, by the library's own functions.

    It would derive them from a tensor on the device, and the host would wait for that in each layer.
    """
    merge, on_host = int(tower.spatial_merge_size), torch.tensor(grids)
    tensors = {"position_ids": get_vision_position_ids(on_host, merge)}
    lengths = {"seqlen": get_vision_cu_seqlens(on_host)}
    if hasattr(tower, "window_size"):
        tensors["window_index"], lengths["window_seqlen"] = get_vision_window_index(
            on_host, merge, tower.window_size, tower.patch_size
        )
    if hasattr(tower, "pos_embed"):
        tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
            on_host,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    named: dict[str, object] = {name: _moved(tensor, device) for name, tensor in tensors.items()}
    for name, ends in lengths.items():  # the library hands them on as they are
        pieces = Pieces.of(ends.tolist(), device)
        named |= {f"cu_{name}s": pieces, f"max_{name}": pieces.longest}
    return named


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: from memory that is not page-locked, the host would wait for all queued work."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def use_few_launches(encoder: nn.Module) -> None:
    """Have an encoder with mergers, whose images lie one after the other, use `attention`."""
    if mergers_of(encoder) and all(BOUNDS in signature(layer.forward).parameters for layer in layers_of(encoder)):
        AttentionInterface.register(NAME, attention)
        encoder.config._attn_implementation = NAME


@torch.compiler.disable  # images differ in their pieces, and each would be a variant of the layer's code
def attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Pieces | Tensor,
    **_more: object,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it: (1, heads, patches, head_dim) -> (1, patches, heads, head_dim).

    cu_seq_lens_q: where the library's own forward pass makes them, a tensor, which the host reads once for all layers.
    """
    assert attention_mask is None, "patches of a piece see each other"
    pieces = read_once(cu_seq_lens_q, query.device) if isinstance(cu_seq_lens_q, Tensor) else cu_seq_lens_q
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for torch's own attention
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    takes_flash = kind == "cuda" and not isinstance(query, FakeTensor) and flash_takes(query)
    is_at_once = takes_flash and _is_right(query.device, query.dtype, query.shape[1], query.shape[3])
    return (at_once if is_at_once else by_runs)(query, key, value, pieces, scaling), None


def read_once(ends: Tensor, device: torch.device) -> Pieces:
    """The pieces that end there. The tensor, which layers share, has them as an attribute from then on."""
    known: Pieces | None = getattr(ends, READ, None)
    if known is None:
        known = Pieces.of(ends.tolist(), device)
        setattr(ends, READ, known)
    return known


def at_once(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scaling: float) -> Tensor:
    """All pieces in one launch. scaling: head_dim**-0.5, torch's default, whose name as an argument depends on its
    version."""
    from torch.nn.attention.varlen import varlen_attn

    assert abs(scaling * query.shape[-1] ** 0.5 - 1) < 1e-6, scaling
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (patches, heads, ...)
    result = varlen_attn(query, key, value, pieces.bounds, pieces.bounds, pieces.longest, pieces.longest)
    assert isinstance(result, Tensor)
    return result[None]


def by_runs(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scaling: float) -> Tensor:
    """One call for each run of pieces, which are read where they lie."""
    outputs = []
    for start, tokens, count in pieces.runs:
        qkv = [
            tensor[0].narrow(1, start, tokens * count).unflatten(1, (count, tokens)).transpose(0, 1)
            for tensor in (query, key, value)
        ]
        result = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], scale=scaling)  # (count, heads, tokens, ...)
        outputs.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> bool:
    """Return whether `at_once` agrees with `by_runs` on a few short pieces, gradients included; warns if not."""
    pieces = Pieces.of([0, 3, 67, 131, 140], device)
    noise = torch.Generator(device).manual_seed(0)  # leaves the run's own random numbers alone
    tensors = [torch.randn(1, heads, 140, head_dim, generator=noise, device=device).to(dtype) for _ in range(3)]

    def results(tried: Callable[..., Tensor]) -> list[Tensor]:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            copies = [tensor.clone().requires_grad_() for tensor in tensors]
            output = tried(*copies, pieces, head_dim**-0.5)
            return [output.detach(), *torch.autograd.grad(output.square().sum(), copies)]

    if not (problem := disagreement(lambda: results(at_once), lambda: results(by_runs))):
        return True
    warnings.warn(
        f"torch's variable-length attention is not used in the tower, for {heads} heads of {head_dim} in {dtype} on "
        f"{device}: {problem}. Windows then take a launch for each row of them.",
        stacklevel=2,
    )
    return False
