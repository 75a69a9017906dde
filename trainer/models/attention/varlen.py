"""Variable-length attention for packed sequences: cross-sample scores are never computed.

With a mask over the whole row, a row of 8,192 tokens costs the attention of a sample of that length, whatever it holds.
The host knows where samples begin (`trainer.models.attention.cu_seqlens`), and kernels take them one by one, or all
at once where the device has such a kernel. To torch it is one operation, which compiled layers, activation
checkpointing and traces take as they take a matrix product.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.flop_counter import register_flop_formula

from trainer.models.attention.cu_seqlens import CuSeqlens
from trainer.models.attention.kernels import VarlenArgs, exact, kernel_for

NAME, TRIAL = "vlmpipe_by_sample", "vlmpipe_trial"  # among the kinds of attention that transformers knows
META = torch.device("meta")
# Arguments of some of its models' attention.
UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window", "indices", "block_indices", "cache")


def use_varlen_attention(language_model: nn.Module) -> None:
    """Have a transformers language model take `samples` among its inputs, if it is one that can.

    All its layers see all of a sample that comes before, and nothing else, and it passes further inputs on to them.
    """
    config: Any = language_model.config
    if config._attn_implementation == NAME:
        return
    if not sees_all_before(config) or getattr(config, "attention_dropout", None) or not _passes_on(language_model):
        return
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # where no samples are told, as for `sdpa`
    config._attn_implementation = NAME


def no_mask(rows: int, device: torch.device) -> Tensor:
    """A mask, so that transformers makes none; of no size, so that nothing can be computed with it by mistake."""
    return torch.empty(rows, 1, 0, 0, dtype=torch.bool, device=device)


def _passes_on(language_model: Any) -> bool:
    """Whether one layer's attention gets samples and mask as the model does, and nothing that changes its result.

    A layer of the same kind is run without numbers: that a model takes further inputs says nothing of its layers.
    """
    from transformers.modeling_utils import AttentionInterface

    config = copy.deepcopy(language_model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    mask, samples, met = no_mask(1, META), CuSeqlens.of([[1, 1]], 2), []

    def trial(
        _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        same = attention_mask is mask and given.pop("samples", None) is samples
        met.append(same and not special(key, value, given))
        return query.transpose(1, 2), None

    AttentionInterface.register(TRIAL, trial)
    try:
        with unset_fake_temporarily(), META, torch.no_grad():
            layer: Any = type(language_model)(config)
            layer.config._attn_implementation = TRIAL
            inputs = {"inputs_embeds": torch.empty(1, 2, config.hidden_size), "position_ids": torch.arange(2)[None]}
            layer(**inputs, attention_mask=mask, samples=samples, use_cache=False)
    except Exception:  # whatever a model does with what it does not know: it keeps what it had
        return False
    finally:
        AttentionInterface._global_mapping.pop(TRIAL)
    return met == [True]


def special(key: Tensor, value: Tensor, given: Mapping[str, Any]) -> list[str]:
    """What a model asks of its attention that ours does not do. `given`: by the names that transformers has for it."""
    asked = [name for name in UNKNOWN if given.get(name) is not None]
    asked += ["dropout"] * bool(given.get("dropout")) + ["is_causal"] * (given.get("is_causal") is False)
    return asked + ["value heads of another width"] * (key.shape[-1] != value.shape[-1])


def sees_all_before(config: Any) -> bool:
    """Whether all layers see all that comes before, by torch's own attention or by ours."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = kinds != {"full_attention"} or getattr(config, "sliding_window", None)
    both_ways = getattr(config, "use_bidirectional_attention", False)
    return config._attn_implementation in ("sdpa", NAME) and not windowed and not both_ways


def takes_samples(config: Any) -> bool:
    """Whether `use_varlen_attention` has found the language model of this config to be one that can."""
    return bool(config._attn_implementation == NAME)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    samples: CuSeqlens | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """One layer's, as transformers calls it: (rows, heads, tokens, head_dim) -> (rows, tokens, heads, head_dim)."""
    if samples is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)[0]
        return output, None
    if asked := special(key, value, more):
        raise NotImplementedError(f"{type(module).__name__} asks of attention by sample: {', '.join(asked)}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention has it
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows_first = [each.transpose(1, 2) for each in (query, key, value)]
    output, _ = attend(*rows_first, samples.bounds, samples.device_bounds, scale)
    return output, None


@torch.library.custom_op("vlmpipe::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, device_bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Each token with those of its sample up to itself. Shapes: `trainer.models.attention.kernels`.

    bounds, device_bounds: those of `Samples`. Gives the weighted sums of values, and for the backward pass
    the log-sum-exp of scores.
    """
    with torch.autocast(query.device.type, enabled=False):
        return kernel_for(query, key).forward(query, key, value, VarlenArgs(bounds, device_bounds, scale))


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, tokens, heads = query.shape[:3]
    return query.new_empty(query.shape), query.new_empty(heads, rows * tokens, dtype=exact(query.dtype))


@torch.library.custom_op("vlmpipe::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: Tensor,
    device_bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    with torch.autocast(query.device.type, enabled=False):
        call = VarlenArgs(bounds, device_bounds, scale)
        return kernel_for(query, key).backward(gradient, query, key, value, output, lse, call)


@attend_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, device_bounds, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, device_bounds)


def _backward(ctx: Any, gradient: Tensor, _of_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None, None


attend.register_autograd(_backward, setup_context=_keep)
ATTEND = torch.ops.vlmpipe.attend.default  # as dispatch modes see it


@register_flop_formula(torch.ops.vlmpipe.attend, get_raw=True)
def forward_flops(query: Tensor, _key: Tensor, _value: Tensor, bounds: Tensor, *_: Any, **__: Any) -> int:
    """Two products of every token with all of its sample, as `trainer.sizing.flops` counts them."""
    if isinstance(bounds, FakeTensor):  # has no numbers: then as if a row were one sample
        pairs = query.shape[0] * query.shape[1] ** 2
    else:
        pairs = int(bounds.long().diff().square().sum())
    return 4 * pairs * query.shape[2] * query.shape[3]


@register_flop_formula(torch.ops.vlmpipe.attend_backward, get_raw=True)
def backward_flops(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _output: Tensor, _lse: Tensor, *rest: Any, **__: Any
) -> int:
    """Four products; that kernels compute scores again is not counted."""
    return 2 * forward_flops(query, key, value, *rest)
