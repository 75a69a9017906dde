"""Part `nanovlm`: our step beside nanoVLM's own model and optimizer, from the same weights, on the same samples.

nanoVLM is no package: the part reads a checkout in `build/nanovlm` (github.com/huggingface/nanoVLM).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured, close
from benchmarks.support.workloads import CONFIGS, Workload, workload
from benchmarks.training.products import PRODUCTS_AND_ATTENTION, Products
from benchmarks.training.ready_steps import WARM_UP, ReadyStep, SteadySteps, packed_steps, padded_steps
from benchmarks.training.step_split import by_mkl, one_thread
from benchmarks.training.workloads import TOLERANCE
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.cpu_products import prefers_onednn
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.models.registry import family_of

CHECKOUT = CONFIGS.parent / "build" / "nanovlm"
COMMIT = "4e0c0961846135c2217f95e54cb4c2d66eb55e42"
IGNORED = -100  # of nanoVLM's targets
SIDE, PATCH, SCALE = 64, 8, 2  # pixels of an image's and a patch's side, patches of a token's side
EPS, TOWER_EPS, THETA, MOST_TOKENS = 1e-5, 1e-6, 10000.0, 4096


@dataclass(frozen=True)
class Size:
    """Widths of a model of nanoVLM's architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tower_hidden: int
    tower_layers: int
    tower_heads: int
    batch: int  # packed sequences of a step
    side: int = SIDE
    scale: int = SCALE


# The second has the layers of nanoVLM-222M (SmolLM2-135M, SigLIP B/16), 4 of its 30 and 2 of its 12.
SIZES = {
    "easy-vqa, small model": Size(128, 384, 4, 4, 4, 256, 6, 4, batch=8),
    "easy-vqa, layers of nanoVLM-222M": Size(576, 1536, 4, 9, 3, 768, 2, 12, batch=2),
}
NOTE = (
    "nanoVLM: its model, torch's AdamW as its train.py makes it, its clipping, fp32 on both sides; a batch holds the "
    "samples of our packed sequences, one a row, padded on the right to the longest, which needs no mask. Its tower's "
    "output is rounded to bf16 as ours. Whole steps of one thread, batches ready before the clock starts. nanoVLM "
    "multiplies by torch's default; ours as a job does on this processor. The same library on both sides is what "
    "another processor has. The ceiling is nanoVLM's time over that of our matrix products and attention alone, "
    "one after another on tensors of their own: with nothing left between them a step would reach it."
)
DEFAULT = "MKL" if torch.backends.mkl.is_available() else "torch's default"


def nanovlm(bench: Bench) -> None:
    """Steps with features online and cached beside steps of nanoVLM, which has no cache."""
    sizes = dict(list(SIZES.items())[:1]) if bench.quick else SIZES
    bench.expect(len(sizes))
    with one_thread():
        for name, size in sizes.items():
            of_size(bench, name, size)
    bench.report.note(NOTE)


def of_size(bench: Bench, name: str, size: Size) -> None:
    load = workload(bench, "easy-vqa", overrides(size, quick=bench.quick), name=name)
    count, worker = WARM_UP + (1 if bench.quick else 2), bench.worker  # the worker multiplies as a job does
    theirs = NanoSteps(load, size, padded_steps(load, count, cached=False))
    ours: dict[str, SteadySteps] = {}
    alone: dict[str, Callable[[], Measured]] = {}
    for kind, job in (("online", load.online), ("cached", load.cached)):
        ours[kind] = SteadySteps(job, worker, packed_steps(load, count, cached=kind == "cached"))
        alone[kind] = products_alone(ours[kind])
    sides: dict[tuple[str, str], Callable[[], Measured]] = {}  # by what is measured, and the library
    for library, multiply in libraries().items():
        sides["nanoVLM", library] = partial(multiply, theirs)
        for kind, steps in ours.items():
            sides[f"ours, {kind} features", library] = partial(multiply, steps)
            sides[f"our products alone, {kind} features", library] = partial(multiply, alone[kind])
    found = bench.take_turns(name, {", ".join(side): measure for side, measure in sides.items()}, warm_up=False)
    for kind, steps in ours.items():
        law = f"the losses before the rounds repeat are nanoVLM's (relative {TOLERANCE:g})"
        pair = steps.losses[:count], theirs.losses[:count]
        bench.report.require(close(*pair, TOLERANCE), law, found=f"{name}, {kind}: {pair}")
        for mine, other in pairs(list(libraries())):
            both = "ours, {} features, {}", "our products alone, {} features, {}"
            for claim, label in zip(("step: ours or nanoVLM", "its ceiling"), both, strict=True):
                of_ours, of_nano = label.format(kind, mine), f"nanoVLM, {other}"
                compared = (of_ours, found[of_ours]), (of_nano, found[of_nano])
                bench.report.compare_rates(claim, name, "useful tokens", *compared)


def libraries() -> dict[str, Callable[[Callable[[], Measured]], Measured]]:
    """Ways of multiplying by name: as a job does on this processor, and torch's default where that is another."""
    as_jobs_do = {"oneDNN": lambda measure: measure()} if prefers_onednn() else {}
    return {**as_jobs_do, DEFAULT: by_mkl}


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Libraries of our side and of nanoVLM's: as each multiplies here, then the same for both."""
    return list(dict.fromkeys([(names[0], DEFAULT), *[(name, name) for name in names]]))


def products_alone(steps: SteadySteps) -> Callable[[], Measured]:
    """Make the steps, and return a side that makes nothing but their products and attention. Units: useful tokens."""
    with Products(PRODUCTS_AND_ATTENTION) as products:
        tokens = steps().units
    return lambda: dataclasses.replace(products.alone(), units=tokens)


def overrides(size: Size, *, quick: bool) -> tuple[str, ...]:
    """Of the run file: a model of nanoVLM's architecture, and an optimizer that treats all parameters alike."""
    whole = {
        "model_type": "smolvlm",
        "scale_factor": size.scale,
        "tie_word_embeddings": True,
        "vision_config": {
            "hidden_size": size.tower_hidden, "intermediate_size": 4 * size.tower_hidden, "image_size": size.side,
            "num_hidden_layers": size.tower_layers, "num_attention_heads": size.tower_heads, "patch_size": PATCH,
            "layer_norm_eps": TOWER_EPS,
        },
        "text_config": {
            "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "tie_word_embeddings": True,
            "num_key_value_heads": size.kv_heads, "max_position_embeddings": MOST_TOKENS, "rms_norm_eps": EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "vocab_size": 400,
        },
    }  # fmt: skip
    model = {"family": "smolvlm", "pretrained": {"config": whole}, "tokenizer": "train:400", "image_size": size.side}
    model |= {"tower": None, "language_model": None, "freeze": ["tower"]}  # parts of the run file's own family
    batch = 2 if quick else size.batch
    return (
        f"model={json.dumps(model)}",
        "data.max_samples=800",
        f"train.global_batch_size={batch}",
        f"train.micro_batch_size={batch}",
        "train.optimizer.weight_decay=0",
    )


class NanoSteps:
    """Steps of nanoVLM, as `SteadySteps` are ours: the same weights, samples, rates and clipping."""

    def __init__(self, load: Workload, size: Size, ready: Sequence[ReadyStep]) -> None:
        job = load.online
        settings, optimizer = job.train, job.train.optimizer
        self._clip, self.losses = settings.clip_grad_norm, list[float]()
        with nano_modules() as modules:
            self._model = nano_model(modules, job.model, size, load.chat.tokenizer)
        self._optimizer, self._parameters = nano_optimizer(self._model, optimizer)
        inputs = [(nano_inputs(step.batches), step.useful_tokens) for step in ready]
        self._ready = inputs[WARM_UP:]
        self._train(inputs[:WARM_UP])

    def __call__(self) -> Measured:
        """Units: useful tokens."""
        clock = Clock()
        self._train(self._ready)
        return clock.stop(sum(tokens for _, tokens in self._ready))

    def _train(self, steps: Sequence[tuple[dict[str, Any], int]]) -> None:
        for inputs, _ in steps:
            loss: Tensor = self._model(**inputs)[1]
            loss.backward()
            clip_grad_norm_(self._parameters, max_norm=self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.item())


def nano_optimizer(model: Any, optimizer: OptimizerConfig) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """As its train.py makes it, and the parameters that it trains; the tower is frozen, as by its rate of 0."""
    model.vision_encoder.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": list(part.parameters()), "lr": optimizer.learning_rate} for part in (model.MP, model.decoder)
    ]
    made = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.0)
    return made, [parameter for group in groups for parameter in group["params"]]


def nano_inputs(batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """Arguments of nanoVLM's model for the only one of these."""
    (batch,) = batches
    targets = torch.full_like(batch.input_ids, IGNORED)
    targets.view(-1)[batch.label_index] = batch.label_ids
    assert not isinstance(batch.images, Tensor)
    pixels = batch.images["pixel_values"]  # (1, images, channels, side, side)
    assert isinstance(pixels, Tensor)
    return {"input_ids": batch.input_ids, "images": pixels.flatten(0, 1), "targets": targets}


def is_there() -> bool:
    """Return whether there is a checkout of nanoVLM."""
    return (CHECKOUT / "models").is_dir()


@contextlib.contextmanager
def nano_modules() -> Iterator[Any]:
    """nanoVLM's `vision_language_model`. Its tokenizers, which are downloads, stay out."""
    if not is_there():
        raise SystemExit(
            f"bench-train: no checkout of nanoVLM in {CHECKOUT.relative_to(CONFIGS.parent)}; make one by: git clone "
            f"https://github.com/huggingface/nanoVLM build/nanovlm && git -C build/nanovlm checkout {COMMIT}"
        )
    processors: Any = ModuleType("data.processors")
    processors.get_tokenizer = None
    sys.path.insert(0, str(CHECKOUT))
    sys.modules["data.processors"] = processors
    try:
        yield importlib.import_module("models.vision_language_model")
    finally:
        sys.path.remove(str(CHECKOUT))
        for name in [name for name in sys.modules if name.split(".")[0] in ("models", "data")]:
            del sys.modules[name]


def nano_model(module: Any, config: Any, size: Size, tokenizer: Any) -> Any:
    """nanoVLM's model of this size, with the weights that ours starts from."""
    family = family_of(config)
    ours = family.build(config, tokenizer)
    settings = module.VLMConfig(
        vit_hidden_dim=size.tower_hidden, vit_inter_dim=4 * size.tower_hidden, vit_patch_size=PATCH,
        vit_img_size=size.side, vit_n_heads=size.tower_heads, vit_n_blocks=size.tower_layers, vit_ln_eps=TOWER_EPS,
        lm_hidden_dim=size.hidden, lm_inter_dim=size.intermediate, lm_rms_eps=EPS, lm_re_base=THETA,
        lm_max_position_embeddings=MOST_TOKENS, lm_vocab_size=ours.config.text_config.vocab_size,
        lm_n_heads=size.heads, lm_n_kv_heads=size.kv_heads, lm_n_blocks=size.layers, mp_pixel_shuffle_factor=size.scale,
        mp_image_token_length=(size.side // PATCH // size.scale) ** 2,
    )  # fmt: skip
    module.get_tokenizer = lambda *_: SimpleNamespace(image_token_id=ours.config.image_token_id)
    model = module.VisionLanguageModel(settings, load_backbone=False)
    model.load_state_dict(nano_weights(ours, size))
    model.decoder.head.weight = model.decoder.token_embedding.weight
    model.vision_encoder.register_forward_hook(lambda _module, _inputs, output: output.bfloat16().float())
    return model.train()


def nano_weights(ours: nn.Module, size: Size) -> dict[str, Tensor]:
    """Weights of transformers' SmolVLM by nanoVLM's names."""
    state = ours.state_dict()
    tower, text = "model.vision_model.", "model.text_model."
    named = {
        "vision_encoder.patch_embedding.conv.weight": state[f"{tower}embeddings.patch_embedding.weight"],
        "vision_encoder.patch_embedding.conv.bias": state[f"{tower}embeddings.patch_embedding.bias"],
        "vision_encoder.patch_embedding.position_embedding": state[f"{tower}embeddings.position_embedding.weight"][
            None
        ],
        "MP.proj.weight": state["model.connector.modality_projection.proj.weight"],
        "decoder.token_embedding.weight": state[f"{text}embed_tokens.weight"],
        "decoder.head.weight": state["lm_head.weight"],
        "decoder.norm.weight": state[f"{text}norm.weight"],
        "decoder.rotary_embd.inv_freq": THETA
        ** -(torch.arange(0, size.hidden // size.heads, 2) / (size.hidden // size.heads)),
    }
    for kind in ("weight", "bias"):
        named[f"vision_encoder.layer_norm.{kind}"] = state[f"{tower}post_layernorm.{kind}"]
        for number in range(size.tower_layers):
            source, target = f"{tower}encoder.layers.{number}.", f"vision_encoder.blocks.{number}."
            for theirs, name in (
                ("ln1", "layer_norm1"),
                ("ln2", "layer_norm2"),
                ("attn.out_proj", "self_attn.out_proj"),
            ):
                named[f"{target}{theirs}.{kind}"] = state[f"{source}{name}.{kind}"]
            for name in ("mlp.fc1", "mlp.fc2"):
                named[f"{target}{name}.{kind}"] = state[f"{source}{name}.{kind}"]
            fused = [state[f"{source}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            named[f"{target}attn.qkv_proj.{kind}"] = torch.cat(fused)
    for number in range(size.layers):
        source, target = f"{text}layers.{number}.", f"decoder.blocks.{number}."
        names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn.out_proj": "self_attn.o_proj"}
        names |= {f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}
        names |= {f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        named |= {f"{target}{theirs}.weight": state[f"{source}{name}.weight"] for theirs, name in names.items()}
    return named
