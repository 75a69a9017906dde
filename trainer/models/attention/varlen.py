"""Variable-length attention for packed sequences: cross-sample scores are never computed.

With a mask, a packed sequence costs the attention of one sample of its length. Here kernels take samples one by one, or
all in one launch where the device has such a kernel, by bounds that the host knows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from vlmpipe.trainer.models.attention.attend import attend
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.mixers import MIXERS, mix_by_sample, mixers_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from vlmpipe.trainer.models.attention.context_parallel import ContextParallel

NAME, TRIAL = "vlmpipe_by_sample", "vlmpipe_trial"  # registered with transformers' kinds of attention
META = torch.device("meta")
WINDOWS = "sliding_attention"
ATTENTION = ("full_attention", WINDOWS)  # kinds of layers
CAUSAL = (None, False, "vision")  # "vision": image tokens see each other; see `image_blocks`
# Arguments of some models' attention that this one does not support.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "indices", "block_indices", "cache")
# Model, kind of layer and settings of trials that went well: a start asks for the same model several times.
_PASSED: set[tuple[type[nn.Module], str, str]] = set()


def use_varlen_attention(language_model: nn.Module) -> str:
    """Have a transformers language model accept `samples` as an input, if it can, and return why it cannot.

    It can if each of its layers is causal attention, with a window or without, or a known mixer, and gets the model's
    further inputs.
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
    if kinds := sorted(set(_kinds(config)) - {*ATTENTION, *MIXERS}):
        return f"its layers are {', '.join(kinds)}"
    if config._attn_implementation != "sdpa" or getattr(config, "use_bidirectional_attention", None) not in CAUSAL:
        return "its layers are not plainly causal attention of torch"
    if getattr(config, "attention_dropout", None):
        return "its attention has dropout"
    settings = repr(vars(config))
    for kind in _kinds(config):
        trial = (type(language_model), kind, settings)
        if kind in ATTENTION and trial not in _PASSED:
            if failure := _failure_of_kind(language_model, kind):
                return failure
            _PASSED.add(trial)
    return ""


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))


def no_mask(sequences: int, device: torch.device) -> Tensor:
    """A mask that stops transformers from making one; empty, so that nothing can be computed with it by mistake."""
    return torch.empty(sequences, 1, 0, 0, dtype=torch.bool, device=device)


def _failure_of_kind(language_model: nn.Module, kind: str) -> str:
    """Why a layer's attention does not get the model's samples and mask, or gets something unsupported; else empty.

    Runs a model of one such layer on the meta device, and in bf16, the only type there for grouped products of experts.
    """
    from transformers.modeling_utils import AttentionInterface

    config = copy.deepcopy(language_model.config)
    config.num_hidden_layers = 1
    has_window = kind == WINDOWS
    if getattr(config, "layer_types", None):
        config.layer_types = [kind]
    else:  # all layers have the window, which some models have in their mask alone
        has_window = bool(getattr(config, "sliding_window", None))
    if getattr(config, "num_kv_shared_layers", None):  # by layers before them
        config.num_kv_shared_layers = 0
    mask, samples, calls = no_mask(1, META), CuSeqlens.of([[1, 1]], 2), list[str]()

    def trial(
        _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        asked = unsupported({name: value for name, value in options.items() if name != "samples"})
        if attention_mask is not mask or options.get("samples") is not samples:
            calls.append("its layers do not pass further inputs on to attention")
        elif has_window and not options.get("sliding_window"):
            calls.append("its layers do not say their windows")
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
            if width := getattr(config, "hidden_size_per_layer_input", 0):
                inputs["per_layer_inputs"] = embeddings.new_empty(1, 2, 1, width)
            layer(**inputs, attention_mask=mask, samples=samples, use_cache=False)
    except Exception as error:  # a model may fail in any way on inputs that it does not know: leave it as it is
        first = next(iter(str(error).strip().splitlines()), "")
        return f"a layer fails on bounds of samples ({type(error).__name__}: {first})"
    finally:
        AttentionInterface._global_mapping.pop(TRIAL)
    return calls[0] if len(calls) == 1 else f"one layer asks for attention {len(calls)} times"


def unsupported(options: Mapping[str, object]) -> list[str]:
    """Features of attention that a model asks for and ours lacks. given: further arguments, by transformers' names."""
    asked = [name for name in UNSUPPORTED if options.get(name) is not None]
    return asked + ["dropout"] * bool(options.get("dropout")) + ["is_causal"] * (options.get("is_causal") is False)


def sees_all_before(config: PreTrainedConfig) -> bool:
    """Return whether all layers are plainly causal attention without windows, torch's or ours."""
    windowed = set(_kinds(config)) != {"full_attention"} or getattr(config, "sliding_window", None)
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    return config._attn_implementation in ("sdpa", NAME) and not windowed and not bidirectional


def shares_prefixes(config: PreTrainedConfig) -> bool:
    """Return whether samples may share a prefix in the language model of this config: all its layers are plainly causal
    attention by sample, without windows."""
    return takes_samples(config) and sees_all_before(config)


def takes_samples(config: PreTrainedConfig) -> bool:
    """Return whether `use_varlen_attention` has changed the language model of this config."""
    return bool(config._attn_implementation == NAME)


def block_diagonal_mask(config: PreTrainedConfig, position_ids: Tensor, samples: CuSeqlens | None) -> dict[str, object]:
    """Inputs of a language model with this config that separate packed samples, without a wait for the device.

    transformers would build the same mask, but first read from the device whether any sequence has several samples.
    position_ids: see `mask_of`. samples: their bounds, where known. Raises NotImplementedError for shared prefixes in
    a model that keeps samples apart by positions, which go on from a prefix to its branches.
    """
    if samples is not None and samples.prefixes is not None and not shares_prefixes(config):
        raise NotImplementedError("samples that share a prefix cannot be kept apart by their positions")
    if samples is not None and takes_samples(config):
        return {"attention_mask": no_mask(len(position_ids), position_ids.device), "samples": samples}
    return {"attention_mask": mask_of(config, position_ids, packed=samples is None or samples.packed)}


def mask_of(config: PreTrainedConfig, position_ids: Tensor, *, packed: bool) -> Tensor | None:
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
    sliding_window: int | None = None,
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
    if asked := unsupported(more):
        raise NotImplementedError(f"{type(module).__name__} asks of attention by sample: {', '.join(asked)}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for torch's own attention
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    heads_last = [_widened(tensor, max(query.shape[-1], width)).transpose(1, 2) for tensor in (query, key, value)]
    if context:
        heads_last = context.by_heads(*heads_last)
    if sliding_window and samples.prefixes is not None:
        raise NotImplementedError(f"{type(module).__name__} has a window, in which samples cannot share a prefix")
    blocks = samples.image_blocks if sliding_window or not samples.blocks_in_windows_only else None
    bounds = (samples.bounds, samples.device_bounds)
    output, _ = attend(*heads_last, *bounds, scale, sliding_window or 0, blocks, samples.prefixes)
    return (context.by_tokens(output) if context else output)[..., :width], None


def _widened(heads: Tensor, width: int) -> Tensor:
    """Return heads padded with zeros, which change no score and no other number: kernels take heads of one width."""
    return heads if heads.shape[-1] == width else F.pad(heads, (0, width - heads.shape[-1]))
