"""FLOPs of a model of family hf, counted in its own forward pass.

The pass runs on the CPU with all layers, real inputs and weights that take no memory. Products are counted by torch's
formulas. Neither they nor activations and norms are computed, so that it takes a second. Widths alone do not tell
experts, latent or linear attention, windows and what pools images.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from transformers.initialization import no_init_weights

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS, ModelPart
from vlmpipe.trainer.models.hf.model import PROJECTED, HfVLM
from vlmpipe.trainer.models.hf.processor import kind_of, published_images
from vlmpipe.trainer.models.hf_native.pretrained import part_config
from vlmpipe.trainer.models.layers.deferred_weights import parameters_on_meta
from vlmpipe.trainer.models.layers.freeze import part_of
from vlmpipe.trainer.sizing.model_shape import CountedFlops, Growth

# Fields of the model section that change FLOPs.
SECTION = {"family", "pretrained", "tokenizer", "image_processor", "image_size", "longest_edge"}
SMALL_IMAGE, LARGE_IMAGE = (48, 32), (448, 448)  # pixels
LARGE = 1 << 14  # numbers
NO_VALUES = "_vlmpipe_has_no_values"  # an attribute of features
TOKENS = (64, 128)  # of a sample; linear attention takes 64 at a time


def counted_flops(config: ModelConfig) -> CountedFlops | None:
    """Return the FLOPs of the model's parts, or None if its code does not run on zeros.

    Cached: planner and trainer ask more than once.
    """
    with unset_fake_temporarily(), torch.device("cpu"):
        try:
            return _counted(config.model_dump_json(include=SECTION))
        except Exception:  # any code of any model type; widths give an estimate then
            return None


@functools.lru_cache(8)
def _counted(section: str) -> CountedFlops:
    config = ModelConfig.model_validate_json(section)
    images = published_images(config.tower, config.image_settings)
    module = HfVLM(config, _without_memory(config), images).eval()
    of_images = []
    for size in (SMALL_IMAGE, LARGE_IMAGE):
        inputs = images.tensors([Image.new("RGB", size)])
        with _counting(module) as counts:
            module.features({name: value for name, value in inputs.items() if name in module.features_of})
        of_images.append((images.patches_of(size)[0], counts))
    of_texts = []
    for tokens in TOKENS:
        projected = torch.zeros(0, images.hidden)
        with _counting(module) as counts:
            module.hidden_states(torch.zeros(1, tokens).long(), torch.arange(tokens)[None], {PROJECTED: projected})
        of_texts.append((tokens, counts))
    return CountedFlops(
        tower=_growth(of_images, "tower"),
        projector=_growth(of_images, "projector"),
        language=_growth(of_texts, "language_model"),
    )


def _growth(counts: list[tuple[int, Counter[ModelPart]]], part: ModelPart) -> Growth:
    """Through two points, or a line through the larger one where that would bend down: small images are padded."""
    (few, low), (many, high) = ((count, flops[part]) for count, flops in sorted(counts, key=lambda pair: pair[0]))
    bend = 0.0 if few == many else (high / many - low / few) / (many - few)
    quadratic = max(0.0, bend)
    return Growth(linear=max(0.0, high / many - quadratic * many), quadratic=quadratic)


def _without_memory(config: ModelConfig) -> object:
    """The whole model, whose weights are each one zero that is seen in their shape."""
    whole = copy.deepcopy(part_config(config.tower))
    whole._experts_implementation = "eager"  # others multiply by all experts' weights in memory
    with parameters_on_meta(), no_init_weights():
        model = kind_of(type(whole))(whole).float()
    for parameter in list(model.parameters()):
        weight = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
        torch.utils.swap_tensors(parameter, weight)
    return model


@contextlib.contextmanager
def _counting(module: nn.Module) -> Iterator[Counter[ModelPart]]:
    """Forward FLOPs by part of the model. What is not a product between weights counts for the part that ran last."""
    mode = _Count()
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, inner in module.named_modules():
            if first := next(iter(inner._parameters), None):
                part = part_of(f"{name}.{first}")
                hooks.enter_context(inner.register_forward_pre_hook(functools.partial(mode.enter, part)))
        hooks.enter_context(mode)
        yield mode.flops


class _Count(TorchDispatchMode):
    """Features have no values after the first product, but zeros. Indices and masks do, as models decide by them."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self._part = Counter[ModelPart](), PARTS[0]

    def enter(self, part: ModelPart, *_: object) -> None:
        self._part = part

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        has_values = not any(hasattr(leaf, NO_VALUES) for leaf in tree_leaves((args, kwargs)))
        if formula is None and (has_values or not _may_be_left_out(func, args)):
            output = func(*args, **kwargs)
            return output if has_values else _without_values(output)
        on_meta = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
        output = func(*on_meta[0], **on_meta[1])
        if formula:
            self.flops[self._part] += formula(*args, **kwargs, out_val=output)
        elif any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in tree_leaves(output)):
            return func(*args, **kwargs)  # a comparison
        return _without_values(tree_map_only(Tensor, lambda value: torch.zeros_like(value, device="cpu"), output))


def _without_values(output: object) -> object:
    """The output, with its features marked: their numbers follow from ones that were not computed."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            setattr(leaf, NO_VALUES, True)
    return output


def _may_be_left_out(func: OpOverload, args: tuple[object, ...]) -> bool:
    """Return whether an operation takes large features number by number, or row by row, and gives new ones."""
    if func._schema.is_mutable or (torch.Tag.pointwise not in func.tags and func._overloadpacket not in BY_ROW):
        return False
    return any(isinstance(value, Tensor) and value.is_floating_point() and value.numel() >= LARGE for value in args)


BY_ROW = {torch.ops.aten.native_layer_norm, torch.ops.aten._softmax, torch.ops.aten.mean}
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch has no formula for it
FORMULAS = flop_registry | {FUSED: lambda *inputs, **_: sdpa_flop_count(*(tensor.shape for tensor in inputs[:3]))}
