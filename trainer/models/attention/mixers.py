"""Token mixers other than attention, in packed sequences: gated delta rules and short convolutions.

Such a layer carries a state or a window from token to token and knows no bounds of samples. Here it computes rows of
single samples, those of like lengths together. It is causal, so what stands after a sample changes nothing in it, and
no kernel has to know bounds.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.sample_groups import groups_of_like_lengths

# Kinds of layers in transformers' `layer_types`, and the name of the mixer in such a layer.
MIXERS = {"linear_attention": "linear_attn", "conv": "conv"}
BY_SAMPLE = "vlmpipe_mixes_by_sample"  # an attribute of mixers that compute samples as rows


def mixers_of(language_model: nn.Module) -> list[nn.Module] | None:
    """The mixers of a transformers language model in the order of its layers; None if one of them is unknown."""
    kinds = getattr(language_model.config, "layer_types", None) or []
    mixers = []
    for layer, kind in zip(language_model.layers, kinds, strict=False):
        if kind in MIXERS:
            mixer = getattr(layer, MIXERS[kind], None)
            if not isinstance(mixer, nn.Module):
                return None
            mixers.append(mixer)
    return mixers


def mix_by_sample(mixer: nn.Module) -> None:
    """Have a mixer accept `samples` (see `CuSeqlens`) as an input, and compute each sample as a row of its own.

    The bounds come with the call and are stored nowhere: recomputation calls the mixer again, after the forward pass.
    Calls without samples, as in generation, are computed as before.
    """
    plain = mixer.forward
    setattr(mixer, BY_SAMPLE, True)
    mixer.register_forward_pre_hook(_input_first, with_kwargs=True)

    @functools.wraps(plain)
    @torch.compiler.disable  # samples differ from batch to batch, and each would be a variant of the layer's code
    def forward(
        hidden_states: Tensor, *args: object, samples: CuSeqlens | None = None, context: object = None, **inputs: object
    ) -> Tensor:
        if context is not None:
            raise NotImplementedError(f"{type(mixer).__name__} cannot share a sequence between ranks")
        # Fake tensors have no bounds: a trace counts each sequence as one sample.
        if samples is None or not samples.packed or isinstance(samples.bounds, FakeTensor):
            output: Tensor = plain(hidden_states, *args, **inputs)
            return output
        inputs |= dict.fromkeys(inputs.keys() & {"attention_mask"})  # none: a row has no padding before its end
        tokens = hidden_states.flatten(0, 1).unsqueeze(0)
        mixed: Tensor | None = None
        for group in groups_of_like_lengths(samples.bounds, tokens.device):
            rows = plain(group.read(tokens).squeeze(1), *args, **inputs)
            if mixed is None:
                mixed = rows.new_zeros(1, tokens.shape[1], rows.shape[-1])
            group.write(rows.unsqueeze(1), mixed)
        if mixed is None:  # a batch of padding alone, whose parameters need a gradient as well
            mixed = plain(hidden_states, *args, **inputs)
        return mixed.view(*hidden_states.shape[:-1], -1)

    mixer.forward = forward


def _input_first(
    _mixer: nn.Module, args: tuple[object, ...], inputs: dict[str, object]
) -> tuple[object, dict[str, object]]:
    """Hand hidden states over by place: ZeRO-3's backward hooks, which release weights, see no inputs by name."""
    if args:
        return args, inputs
    rest = dict(inputs)
    return (rest.pop("hidden_states"),), rest
