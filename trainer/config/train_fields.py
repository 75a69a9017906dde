"""Fields of the run file's `train` section, and what follows from them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Fraction, OfFeature, Positive, Section
from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.strategies import PIPELINE_PARALLEL
from vlmpipe.trainer.config.train_options import (
    BestMetric,
    Checkpointing,
    CompileBackend,
    Compression,
    ComputeType,
    EarlyStoppingConfig,
    Float8,
    MlflowConfig,
    Precision,
    ProfileConfig,
    ReshardAfterForward,
    StateType,
    WandbConfig,
)

MAX_COMPARED_SEQUENCES = 8  # of the validation after the last step, where a run takes no other
# Fields of which a run file gives one: a changed value of the one takes the other's place.
ONE_OF_TWO = {"warmup_steps": "warmup_fraction", "warmup_fraction": "warmup_steps"}
MAX_EPOCHS = 100_000  # more is a slip of the finger


class TrainFields(Section):
    """The fields, without rules between them: those are in `vlmpipe.trainer.config.train`."""

    trainer: ExternalTrainerConfig | None = Field(
        None, description="Training program of your own, such as TRL or a train.py; null for vlmpipe's trainer."
    )
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "tp+pp+dp"] = Field(
        "ddp", description="Strategy of distributed training."
    )
    objective: Annotated[Literal["sft", "dpo", "simpo"], OfFeature("preferences")] = Field(
        "sft",
        description="Training objective: sft learns the answers; dpo prefers each sample's chosen answer to its "
        "rejected one, relative to the initial model (Rafailov et al., 2023); simpo does by the mean log probability "
        "of an answer's tokens, without a reference (Meng et al., 2024). dpo and simpo are for ddp, fsdp, hsdp and "
        "the zero strategies.",
    )
    dpo_beta: float = Field(
        0.1, gt=0, description="Strength with which dpo keeps the model close to the initial one; higher is closer."
    )
    simpo_beta: float = Field(
        2.0, gt=0, description="Factor of the mean log probability of an answer's tokens in simpo's reward."
    )
    simpo_gamma: float = Field(
        1.0, ge=0, description="Target margin between simpo's rewards of the chosen and the rejected answer."
    )
    offload: Literal["none", "optimizer", "optimizer+weights"] = Field(
        "none",
        description="State that is kept and updated in host memory instead of the GPU's, with slower steps; none "
        "keeps all on the GPU. optimizer is for the zero strategies, optimizer+weights for zero3, fsdp and hsdp.",
    )
    tensor_parallel: Positive = Field(1, description="Ranks of one node that split each layer. For the tp strategies.")
    sequence_parallel: bool = Field(
        False,
        description="Split the tokens of each sequence over the tensor-parallel ranks between the sharded parts of a "
        "layer, for less activation memory. For the tp strategies.",
    )
    pipeline_parallel: Positive = Field(
        1, description="Ranks that the layers are divided over, in pipeline stages. For the pp strategies."
    )
    virtual_stages: Positive = Field(
        1,
        description="Stages on each rank of a pipeline; 2 or more are interleaved, for less waiting and more "
        "communication. Raise it where stages wait for each other for long.",
    )
    context_parallel: Positive = Field(
        1,
        description="Ranks that share the tokens of each packed sequence in the language model, and in attention its "
        "heads (DeepSpeed-Ulysses), for less activation memory. Must divide the language model's attention heads and "
        "data.sequence_length. For ddp, fsdp, hsdp and the zero strategies.",
    )
    epochs: int = Field(
        1,
        ge=0,
        le=MAX_EPOCHS,
        description="Passes over the training split; 0, in variants of a sweep only, evaluates the initial model.",
    )
    max_steps: int = Field(0, ge=0, description="Optimizer steps after which training stops; 0 trains all epochs.")
    global_batch_size: Positive = Field(description="Packed sequences per optimizer step over all ranks.")
    micro_batch_size: Positive = Field(1, description="Packed sequences per forward pass on one rank.")
    optimizer: OptimizerConfig = Field(description="AdamW settings.")
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Learning rate after warm-up; wsd stays at the peak and falls at the end."
    )
    warmup_fraction: Fraction | None = Field(
        0.03,
        description="Share of steps in which the learning rate rises linearly from 0; null with warmup_steps.",
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="Steps in which the learning rate rises linearly from 0, in place of warmup_fraction, which is "
        "left out then; null takes the fraction.",
    )
    decay_fraction: Fraction = Field(
        0.2,
        description="Share of steps at the end in which the learning rate falls. For lr_schedule wsd. Raise it for a "
        "longer decay.",
    )
    final_rate_fraction: Fraction = Field(
        0.0,
        description="Learning rate at the last step, as a share of the peak. Raise it where another run trains on from "
        "the result.",
    )
    ema_decay: Annotated[float, OfFeature("ema")] = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the trained weights, such as 0.999, which is "
        "validated, exported and evaluated in place of the weights; 0 keeps none.",
    )
    router_loss: Annotated[float, OfFeature("router_loss")] = Field(
        0.0,
        ge=0,
        lt=1,
        description="Coefficient of the loss that balances the experts of a sparse model, part of the training loss, "
        "such as 0.001; 0 adds none, as transformers does. For model types whose balancing loss transformers has.",
    )
    clip_grad_norm: float = Field(1.0, ge=0, description="Maximum global gradient norm; 0 does not clip.")
    precision: Precision = Field(
        "bf16",
        description="Number types of training. bf16: bf16 weights, with fp32 masters of trained ones in the "
        "optimizer. bf16-autocast: fp32 weights that each matrix product rounds, with more memory. fp16: the same in "
        "fp16, for GPUs without bf16; the loss is scaled, and steps that overflow are skipped. fp32: no rounding.",
    )
    shard_frozen_weights: bool = Field(
        False,
        description="Shard frozen weights like trained ones and all-gather them in each pass, for less memory and "
        "more communication. For fsdp and hsdp; zero3 always does.",
    )
    gradient_accumulation_dtype: StateType = Field(
        "fp32",
        description="Type of the sums of gradients over micro-batches with precision bf16; bf16 takes 2 bytes a "
        "number less in the optimizer's shard and rounds each sum. For the zero strategies.",
    )
    reduce_dtype: StateType = Field(
        "fp32",
        description="Type of the sums of gradients over ranks with precision bf16, with ddp and hsdp also over "
        "micro-batches; bf16 sends half the bytes and rounds the sums.",
    )
    reshard_after_forward: ReshardAfterForward = Field(
        "auto",
        description="Whether FSDP frees gathered weights after a forward pass and all-gathers them again for the "
        "backward pass: auto frees those of layers; never keeps all, for more memory and half of the "
        "all-gathers; always also frees those outside of layers. For fsdp, hsdp and tp; pipeline stages "
        "gather once a step and keep all. Set it to never where memory is left and steps wait for "
        "all-gathers.",
    )
    prefetch_layers: Positive = Field(
        1,
        description="Layers whose weights FSDP all-gathers ahead of use; more hide slow communication and take more "
        "memory. For fsdp, hsdp and tp. Raise it where steps wait for all-gathers.",
    )
    activation_checkpointing: Checkpointing = Field(
        "none",
        description="Recomputation in the backward pass. full recomputes each layer of the language model: least "
        "memory, about a third more compute. selective saves the results of its matrix products and attention and "
        "recomputes the rest. none saves all activations.",
    )
    tower_activation_checkpointing: bool = Field(
        False,
        description="Recompute each layer of a trained vision encoder in the backward pass, for less memory and about "
        "a third more compute of the encoder. No effect with a frozen tower.",
    )
    activation_offloading: bool = Field(
        False,
        description="Move the saved inputs of layers to host memory until the backward pass; GPUs overlap the copies "
        "with compute. Needs activation_checkpointing full; for all strategies without pipeline stages.",
    )
    loss_chunk_tokens: int = Field(
        1024,
        ge=0,
        description="Label tokens per chunk of the loss: logits exist for one chunk only, and all chunks but one are "
        "recomputed in the backward pass. 0 computes all logits together.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compile each layer by torch.compile: fewer, larger kernels after a slow first step. auto does so "
        "on GPUs for models below 3B parameters or micro-batches of at most 4,096 tokens. For all strategies but "
        "zero3.",
    )
    compile_backend: CompileBackend = Field(
        "inductor",
        description="Backend of torch.compile: inductor fuses kernels; aot_eager keeps the operations, to locate "
        "errors.",
    )
    float8: Annotated[Float8, OfFeature("float8")] = Field(
        "none",
        description="8-bit float matrix products (torchao) in layers of the language model and of a trained tower, "
        "with one scale per tensor (tensorwise) or per row (rowwise); none for no 8-bit products. For ddp, fsdp and "
        "hsdp with precision bf16, on GPUs of compute capability 8.9 or newer (L4, H100).",
    )
    gradient_compression: Compression = Field(
        "none",
        description="Number type in which ddp sends gradients: bf16 and fp16 take half the bytes and round the sums, "
        "and fp16 loses gradients below 6e-8; none sends fp32.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="DeepSpeed settings that replace those derived from this file, key by key. For the zero "
        "strategies. Keys that this file decides or that would have no effect are refused; the result is written to "
        "deepspeed.json. zero_optimization.zero_hpz_partition_size, as many as a node's processes, keeps a second copy "
        "of the weights in each node (ZeRO++ hpZ): for zero3 where the network between nodes is slow.",
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Metrics on Weights & Biases.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="Metrics in MLflow.")
    seed: int = Field(0, description="Seed of the data order.")
    log_every_steps: Positive = Field(10, description="Steps between lines of metrics.jsonl.")
    validate_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between validation losses (validation_loss in metrics.jsonl), in addition to one after the "
        "last step, which evaluate compares with that of the export. 0 takes that one only, on at most 8 sequences.",
    )
    validation_sequences: Positive = Field(
        64, description="Packed sequences of the validation split for validation losses, the same ones each time."
    )
    best_metric: BestMetric = Field(
        "validation_loss",
        description="What early_stopping and checkpoint.export best compare: the loss of the validation sequences, or "
        "validation_exact_match, the share of their answers that greedy decoding would give token by token.",
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None, description="When training ends before its last step; null trains all steps. Needs validate_every_steps."
    )
    checkpoint_every_steps: Positive = Field(100, description="Steps between checkpoints.")
    keep_checkpoints: Positive = Field(2, description="Number of newest committed checkpoints to keep.")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto continues from the newest good checkpoint; never does not use checkpoints of earlier "
        "submissions of the run, while restarts of the same submission continue from its own.",
    )
    deterministic: bool = Field(
        False,
        description="Use deterministic kernels, for bit-equal reruns; slower on GPUs. Set it to look for the cause of a"
        " difference between two runs.",
    )
    measure_communication: bool = Field(
        False, description="Time collectives by size, inside a node and between nodes, before training starts."
    )
    profile: ProfileConfig | None = Field(
        None, description="Steps to profile, for the run report and TensorBoard; null for none."
    )
    stall_factor: float = Field(
        20.0,
        ge=0,
        description="Median step times without a finished step after which the job ends; 0 never ends it. Raise it "
        "where steps differ much in time.",
    )
    stall_floor_s: float = Field(
        300.0,
        gt=0,
        description="Minimum seconds without a step that are a stall, whatever train.stall_factor says. Raise it where "
        "single steps wait minutes for data.",
    )

    @property
    def validated_sequences(self) -> int:
        """The most packed sequences of a validation: few where its only use is to compare the export with."""
        few = self.validation_sequences if self.validate_every_steps else MAX_COMPARED_SEQUENCES
        return min(self.validation_sequences, few)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the number of steps of `total_steps` in which the learning rate rises."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((self.warmup_fraction or 0.0) * total_steps)

    @property
    def in_pairs(self) -> bool:
        """Return whether a sample is a pair of a chosen and a rejected answer."""
        return self.objective != "sft"

    @property
    def has_reference(self) -> bool:
        """Return whether pairs are compared with the model that training starts from."""
        return self.objective == "dpo"

    @property
    def compute_type(self) -> ComputeType:
        """Type of the operands of matrix products."""
        return "bf16" if self.precision == "bf16-autocast" else self.precision

    @property
    def has_bf16_weights(self) -> bool:
        """Return whether weights that compute are bf16 tensors: trained ones beside their fp32 masters, frozen ones
        alone.
        """
        return self.precision == "bf16"

    @property
    def stages(self) -> int:
        """Parts that the model is cut into across its depth: rank r of a pipeline of p holds number r, r + p, ..."""
        return self.pipeline_parallel * self.virtual_stages

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def sequence_ranks(self) -> int:
        """Ranks that train on the same packed sequences together."""
        return self.model_ranks * self.context_parallel

    def loss_chunks(self, label_tokens: float) -> int:
        """Return the number of chunks in which the loss of a micro-batch with `label_tokens` is computed."""
        return max(1, math.ceil(label_tokens / self.loss_chunk_tokens)) if self.loss_chunk_tokens else 1

    @property
    def keeps_gathered_weights(self) -> bool:
        """Return whether FSDP keeps gathered weights from the forward to the backward pass. Stages of a pipeline do so
        for all micro-batches of a step."""
        return self.reshard_after_forward == "never" or self.strategy in PIPELINE_PARALLEL

    @property
    def rounds_gradients(self) -> bool:
        """Return whether gradients travel as numbers of two bytes."""
        return self.gradient_compression in ("bf16", "fp16")

    @property
    def rate_scale(self) -> float:
        """Factor of all peak rates for the size of the global batch, where the run file asks for it.

        linear: Goyal et al. 2017, arXiv 1706.02677 (SGD); sqrt: Malladi et al. 2022, arXiv 2205.10782 (Adam).
        """
        if self.optimizer.batch_scaling == "none":
            return 1.0
        ratio = self.global_batch_size / self.optimizer.reference_batch_size
        return ratio if self.optimizer.batch_scaling == "linear" else math.sqrt(ratio)
