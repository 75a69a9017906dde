"""Time that one GPU computes a packed sequence: matrix products, attention, and the memory traffic between them.

Products and attention take FLOPs / the rates that a GPU sustains in training (`rates` in catalog/machines.yaml). Norms,
activations, residuals and the loss compute little and move much: their bytes / the memory's bandwidth. So small models,
where more is moved for each FLOP, reach a smaller share of the peak, and fast GPUs a smaller one than slow GPUs.

The bytes and shares below are fitted to published runs, see `benchmarks.planner.published_runs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.pipeline_partition import by_rank
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP, Layout
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.compiling import compile_choice
from vlmpipe.trainer.sizing.flops import SequenceFlops, tower_attention_share
from vlmpipe.trainer.sizing.model_shape import ModelShape, Stack
from vlmpipe.trainer.sizing.pipeline_partition import stages_of

# Bytes moved for each number that a token has at a layer's width or at its feed-forward width, in one pass. Kernels
# that are not fused read and write each some five times; torch.compile fuses most of them.
BYTES_PER_NUMBER = 22.0
COMPILED_BYTES_PER_NUMBER = 8.0
# Of each of a label's logits, forward and backward: bf16 products, fp32 copies, softmax and gradient.
BYTES_PER_LOGIT = 42.0
# Rate of matrix products in 8 bits over that in bf16. The best products on an H100 are 1,403 and 795 TFLOP/s
# (ml-engineering), and 6,667 to 8,532 tokens/s of an 8B model (torchtitan, tensorwise) ask for as much. By row: 5,760
# and 6,424 tokens/s (torchtitan, commit 7a04053).
FLOAT8 = {"tensorwise": 1.76, "rowwise": 1.3}
# Both are of models at least so wide. At 2,048 an H200 had 0.78 and 0.68 of the speed of compiled layers in bf16
# (benchmarks/results/2026-11-26-h200.md).
MIN_WIDTH_FOR_FLOAT8 = 4096
# Kernels are launched one by one: a layer's pass cannot be shorter. Read: 58.8 ms a step for Llama 1B, 16 layers, and
# 17.6 with CUDA graphs (ml-engineering): some 2 ms a layer for a forward pass, twice that backward, and launches alone.
LAUNCH_S_PER_PASS = 0.65e-3
# With adapters, whose small matrices are launched too: 1, 1.2 and 1.6 s for 8 sequences of 256 tokens in 24, 32 and 40
# layers that are passed four times (Qwen's README, LoRA on one A100).
ADAPTED_LAUNCH_S_PER_PASS = 1.2e-3


@dataclass(frozen=True)
class Rates:
    """Rates that one GPU sustains, in FLOP/s and bytes/s."""

    trained: float  # matrix products in the run's precision
    in_layers: float  # those of trained language layers, in 8 bits with train.float8
    frozen: float  # those of frozen parts of the model in the training step
    beside: float  # jobs beside training, which compute in bf16 where training does, and in fp32 otherwise
    attention: float  # of language layers, in which half of the pairs of tokens are computed
    tower_attention: float  # between all patches of an image
    memory: float
    peak: float  # nominal, of the run's precision
    bytes_per_number: float
    launch_s: float  # of a layer's pass


@dataclass(frozen=True)
class MovedBytes:
    """Memory traffic of one packed sequence beside that of matrix products and attention."""

    tower: float
    layers: float  # that tensor-parallel ranks do not share: at the width of hidden states
    sharded_layers: float  # at the feed-forward width
    head: float


def reached(config: RunConfig, shape: ModelShape, layout: Layout, gpu: Gpu, *, cached: bool) -> tuple[Rates, list[str]]:
    """The rates to compute with, and their assumptions as sentences."""
    sentences = []
    train, measured = config.train, config.plan.efficiency
    fp32 = gpu.fp32_tflops * 1e12
    peak = fp32
    if train.compute_type == "bf16" and gpu.bf16_tflops is None:
        sentences.append(f"{gpu.accelerator_type} has no bf16 units: bf16 is taken as no faster than fp32.")
    elif train.precision == "fp16" and gpu.bf16_tflops is None:
        sentences.append(
            f"The catalogue has no fp16 rate of {gpu.accelerator_type}: fp16 is taken as no faster than fp32."
        )
    elif train.precision != "fp32":
        assert gpu.bf16_tflops is not None  # fp16 has the rate of bf16 on GPUs that have both
        peak = gpu.bf16_tflops * 1e12
    if measured:
        sentences.append(f"Computing reaches {measured:.0%} of the peak (plan.efficiency).")
    else:
        sentences.append(
            f"Matrix products reach {gpu.matmul_share:.0%} of {gpu.accelerator_type}'s peak and attention "
            f"{gpu.attention_share:.0%}, {gpu.rates_from}."
        )
    products = frozen = peak
    computes_frozen = shape.left_whole - ({"tower"} if cached else set())
    leaves_fp32 = layout.strategy in SHARDED_BY_FSDP and not train.has_bf16_weights
    if leaves_fp32 and peak > fp32 and computes_frozen:
        frozen = fp32
        sentences.append("Frozen parts stay fp32, so they compute at the fp32 rate.")
    share = measured or gpu.matmul_share
    compiled = compile_choice(
        train,
        on_gpu=True,
        parameters=shape.total_parameters,
        sequence_length=config.data.sequence_length,
        quantizes_base=config.model.quantizes_base,
    ).on
    return Rates(
        trained=products * share,
        in_layers=products * share * (1.0 if measured else float8_gain(train.float8, shape.language.hidden)),
        frozen=frozen * share,
        beside=(peak if train.precision == "bf16" else fp32) * share,
        # A measured share of the peak counts attention as if every token saw every other, and all time as computing.
        attention=peak * (measured / 2 or gpu.attention_share),
        tower_attention=peak * (measured or gpu.attention_share),
        memory=math.inf if measured else gpu.memory_gbytes_per_s * 1e9,
        peak=peak,
        bytes_per_number=COMPILED_BYTES_PER_NUMBER if compiled else BYTES_PER_NUMBER,
        launch_s=0.0 if compiled or measured else ADAPTED_LAUNCH_S_PER_PASS if shape.adapters else LAUNCH_S_PER_PASS,
    ), sentences


def float8_gain(recipe: str, width: int) -> float:
    """How many times as fast products of language layers are taken to be as in bf16."""
    return FLOAT8.get(recipe, 1.0) if width >= MIN_WIDTH_FOR_FLOAT8 else 1.0


def moved_bytes(
    config: RunConfig, shape: ModelShape, load: Workload, flops: SequenceFlops, rates: Rates, *, cached: bool
) -> MovedBytes:
    """Return the memory traffic of one packed sequence, over all ranks of a model replica; `layers` is per rank."""
    language, tower = shape.language, shape.tower
    passes = _passes(config, flops)
    bytes_per_token = rates.bytes_per_number * passes * language.layers
    in_adapters = sum(shape.adapters.values()) / shape.adapter_rank / 4 if shape.adapters else 0.0
    tower_passes = flops.tower.total / flops.tower.forward if flops.tower.forward else 0.0
    images = 0.0 if cached else load.images_per_sequence
    return MovedBytes(
        tower=images
        * shape.tower_tokens
        * tower.layers
        * (tower.hidden + _inner(tower))
        * tower_passes
        * rates.bytes_per_number,
        layers=load.sequence_length * bytes_per_token * language.hidden,
        sharded_layers=load.sequence_length * bytes_per_token * (_inner(language) + in_adapters),
        head=load.label_tokens_per_sequence * shape.vocabulary * BYTES_PER_LOGIT,
    )


def compute_seconds(
    flops: SequenceFlops, moved: MovedBytes, config: RunConfig, shape: ModelShape, layout: Layout, rates: Rates
) -> float:
    """One rank's time for one packed sequence of a micro-batch; in a pipeline, that of the slowest stage.

    Tensor parallelism shards all but the projector, one of each adapter's matrices, and what is done to hidden states
    between the sharded parts, unless ranks share their tokens. Context parallelism shards all but the tower and the
    projector.
    """
    ranks = layout.tensor_parallel
    left_whole = "language_layers" in shape.left_whole
    layers_rate, head_rate = (rates.frozen, rates.frozen) if left_whole else (rates.in_layers, rates.trained)
    tower_rate = rates.frozen if "tower" in shape.left_whole else rates.trained
    projector_rate = rates.frozen if "projector" in shape.left_whole else rates.trained
    attention = flops.tower.total * tower_attention_share(shape, config.model.feature_layer)
    whole = (flops.tower.total - attention) / tower_rate + attention / min(tower_rate, rates.tower_attention)
    whole += moved.tower / rates.memory
    whole = whole / (ranks if shape.shards_tower else 1) + flops.projector.total / projector_rate
    layers = flops.language_layers.total / layers_rate / ranks
    layers += flops.attention.total / 2 / rates.attention / ranks  # causal: half of the pairs are computed
    layers += shape.of_tensor_rank("adapters", flops.adapters.total, ranks) / rates.trained
    between = moved.layers / ranks if config.train.sequence_parallel else moved.layers
    layers += (between + moved.sharded_layers / ranks) / rates.memory
    head = (flops.head.total / head_rate + moved.head / rates.memory) / ranks
    layers, head = layers / layout.context_parallel, head / layout.context_parallel
    one_layer = max(
        layers / shape.language.layers, rates.launch_s * _passes(config, flops) / config.train.micro_batch_size
    )
    stages = stages_of(shape.language.layers, layout.stages, flops, image_layers=shape.image_layers)
    return max(
        whole * stage.is_first + one_layer * len(stage.layers) + head * stage.is_last
        for stage in by_rank(stages, layout)
    )


def _passes(config: RunConfig, flops: SequenceFlops) -> float:
    """Forward passes over the layers that take as long as all passes do: a backward pass counts as two."""
    again = config.train.activation_checkpointing == "selective"
    return flops.attention.total / flops.attention.forward + again if flops.attention.forward else 0.0


def _inner(stack: Stack) -> int:
    """Numbers of a token at the feed-forward width; gated parts have two matrices that give it."""
    return stack.intermediate * (2 if stack.gated else 1)
