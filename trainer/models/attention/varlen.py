"""Variable-length attention for packed sequences: cross-sample scores are never computed.

With a mask, a packed sequence costs the attention of one sample of its length. Here kernels take samples one by one, or
all in one launch where the device has such a kernel. The host knows their bounds
(`vlmpipe.trainer.models.attention.cu_seqlens`). To torch it is one operation, which compiled layers, activation
checkpointing and traces handle as a matrix product.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernels import VarlenArgs, exact, kernel_for
from vlmpipe.trainer.models.attention.mixers import MIXERS, mix_by_sample, mixers_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from vlmpipe.trainer.models.attention.context_parallel import ContextParallel

NAME, TRIAL = "vlmpipe_by_sample", "vlmpipe_trial"  # registered with transformers' kinds of attention
META = torch.device("meta")
# Arguments of some models' attention that this one does not support.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window", "indices", "block_indices", "cache")


def use_varlen_attention(language_model: nn.Module) -> str:
    """Have a transformers language model accept `samples` as an input, if it can, and return why it cannot.

    It can if each of its layers is plainly causal attention or a known mixer, and gets the model's further inputs.
    """
    config: PreTrainedConfig = language_model.config
    if config._attn_implementation == NAME:
        return ""
    mixers = mixers_of(language_model)
    if reason := _why_masked(language_model, mixers):
        return reason
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    for mixer in mixers or ():
        mix_by_sample(mixer)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without samples, as for `sdpa`
    config._attn_implementation = NAME
    return ""


def _why_masked(language_model: nn.Module, mixers: list[nn.Module] | None) -> str:
    config = language_model.config
    if mixers is None:
        return "a layer has a mixer that is not known"
    if not sees_all_before(config, beside=MIXERS):
        kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", *MIXERS})
        return f"its layers are {', '.join(kinds)}" if kinds else "its layers are not plainly causal attention of torch"
    if getattr(config, "attention_dropout", None):
        return "its attention has dropout"
    return _trial_failure(language_model)


def no_mask(sequences: int, device: torch.device) -> Tensor:
    """A mask that stops transformers from making one; empty, so that nothing can be computed with it by mistake."""
    return torch.empty(sequences, 1, 0, 0, dtype=torch.bool, device=device)


def _trial_failure(language_model: nn.Module) -> str:
    """Why a layer's attention does not get the model's samples and mask, or gets something unsupported; else empty.

    Runs a model of one such layer on the meta device, and in bf16, the only type there for grouped products of experts.
    """
    from transformers.modeling_utils import AttentionInterface

    config = copy.deepcopy(language_model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    mask, samples, calls = no_mask(1, META), CuSeqlens.of([[1, 1]], 2), list[str]()

    def trial(
        _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: object
    ) -> tuple[Tensor, None]:
        asked = unsupported(key, value, {name: one for name, one in given.items() if name != "samples"})
        if attention_mask is not mask or given.get("samples") is not samples:
            calls.append("its layers do not pass further inputs on to attention")
        else:
            calls.append(f"its attention has {', '.join(asked)}" if asked else "")
        return query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    AttentionInterface.register(TRIAL, trial)
    try:
        with unset_fake_temporarily(), META, torch.no_grad():
            layer: nn.Module = type(language_model)(config).bfloat16()
            layer.config._attn_implementation = TRIAL
            embeddings = torch.empty(1, 2, config.hidden_size, dtype=torch.bfloat16)
            inputs = {"inputs_embeds": embeddings, "position_ids": torch.arange(2)[None]}
            layer(**inputs, attention_mask=mask, samples=samples, use_cache=False)
    except Exception as error:  # a model may fail in any way on inputs that it does not know: leave it as it is
        first = next(iter(str(error).strip().splitlines()), "")
        return f"a layer fails on bounds of samples ({type(error).__name__}: {first})"
    finally:
        AttentionInterface._global_mapping.pop(TRIAL)
    return calls[0] if len(calls) == 1 else f"one layer asks for attention {len(calls)} times"


def unsupported(key: Tensor, value: Tensor, given: Mapping[str, object]) -> list[str]:
    """Features of attention that a model asks for and ours lacks. given: further arguments, by transformers' names."""
    asked = [name for name in UNSUPPORTED if given.get(name) is not None]
    asked += ["dropout"] * bool(given.get("dropout")) + ["is_causal"] * (given.get("is_causal") is False)
    return asked + ["value heads of another width"] * (key.shape[-1] != value.shape[-1])


def sees_all_before(config: PreTrainedConfig, beside: Collection[str] = ()) -> bool:
    """Return whether all layers are plainly causal attention, torch's or ours, or of a kind in `beside`."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = not kinds <= {"full_attention", *beside} or getattr(config, "sliding_window", None)
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    return config._attn_implementation in ("sdpa", NAME) and not windowed and not bidirectional


def takes_samples(config: PreTrainedConfig) -> bool:
    """Return whether `use_varlen_attention` has changed the language model of this config."""
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
    context: ContextParallel | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it.

    (sequences, heads, tokens, head_dim) -> (sequences, tokens, heads, head_dim). With `context`, tokens are those of
    this rank.
    """
    if samples is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)[0]
        return output, None
    if asked := unsupported(key, value, more):
        raise NotImplementedError(f"{type(module).__name__} asks of attention by sample: {', '.join(asked)}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for torch's own attention
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads_last = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if context:
        heads_last = context.by_heads(*heads_last)
    output, _ = attend(*heads_last, samples.bounds, samples.device_bounds, scale)
    return context.by_tokens(output) if context else output, None


@torch.library.custom_op("vlmpipe::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, device_bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside samples. Shapes: see `vlmpipe.trainer.models.attention.kernels`.

    bounds, device_bounds: see `CuSeqlens`. Returns the output, and for the backward pass the log-sum-exp of scores.
    """
    with torch.autocast(query.device.type, enabled=False):
        return kernel_for(query, key).forward(query, key, value, VarlenArgs(bounds, device_bounds, scale))


@attend.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sequences, tokens, heads = query.shape[:3]
    return query.new_empty(query.shape), query.new_empty(heads, sequences * tokens, dtype=exact(query.dtype))


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
        args = VarlenArgs(bounds, device_bounds, scale)
        return kernel_for(query, key).backward(gradient, query, key, value, output, lse, args)


@attend_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _AttendContext(FunctionCtx):
    """Values saved for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    scale: float


def _save(
    ctx: _AttendContext, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, bounds, device_bounds, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, device_bounds)


def _backward(ctx: _AttendContext, gradient: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None, None


attend.register_autograd(_backward, setup_context=_save)
ATTEND = torch.ops.vlmpipe.attend.default  # what dispatch modes see


@register_flop_formula(torch.ops.vlmpipe.attend, get_raw=True)
def forward_flops(query: Tensor, _key: Tensor, _value: Tensor, bounds: Tensor, *_: object, **__: object) -> int:
    """Two products of each token with its whole sample, as `vlmpipe.trainer.sizing.flops` counts."""
    if isinstance(bounds, FakeTensor):  # has no values: count each sequence as one sample
        pairs = query.shape[0] * query.shape[1] ** 2
    else:
        pairs = int(bounds.long().diff().square().sum())
    return 4 * pairs * query.shape[2] * query.shape[3]


@register_flop_formula(torch.ops.vlmpipe.attend_backward, get_raw=True)
def backward_flops(
    _gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _output: Tensor,
    _lse: Tensor,
    *rest: Tensor,
    **__: object,
) -> int:
    """Four products; recomputed scores are not counted."""
    return 2 * forward_flops(query, key, value, *rest)
