"""The run file's `train` section: strategy, batch, schedule, precision, and which settings exclude each other."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from vlmpipe.trainer.config import deepspeed_keys
from vlmpipe.trainer.config.base import Fraction, Positive, Section
from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.precision import Compression, ComputeType, Precision, StateType, require_number_types
from vlmpipe.trainer.config.strategies import PIPELINE_PARALLEL, require_support
from vlmpipe.trainer.config.train_options import MlflowConfig, ProfileConfig, WandbConfig

Checkpointing = Literal["none", "selective", "full"]
CompileBackend = Literal["inductor", "aot_eager"]
Float8 = Literal["none", "tensorwise", "rowwise"]
ReshardAfterForward = Literal["auto", "always", "never"]

MAX_COMPARED_SEQUENCES = 8  # of the validation after the last step, where a run takes no other
MOST_EPOCHS = 100_000  # more is a slip of the finger


class TrainConfig(Section):
    """The training step."""

    trainer: ExternalTrainerConfig | None = Field(
        None, description="A training program of one's own, such as TRL or a train.py; null for vlmpipe's trainer."
    )
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "tp+pp+dp"] = Field(
        "ddp", description="How training is distributed."
    )
    objective: Literal["sft", "dpo", "simpo"] = Field(
        "sft",
        description="sft learns the answers. dpo learns to prefer each sample's last answer to its rejected one, as "
        "the model that training starts from does not yet (Rafailov et al., 2023); simpo the same without a reference, "
        "by the mean log probability of an answer's tokens (Meng et al., 2024). Both for ddp, fsdp, hsdp and the zero "
        "strategies.",
    )
    dpo_beta: float = Field(
        0.1, gt=0, description="How strongly dpo holds the model to the one it starts from; higher is closer."
    )
    simpo_beta: float = Field(
        2.0, gt=0, description="What simpo multiplies an answer's mean log probability by; higher trains harder."
    )
    simpo_gamma: float = Field(
        1.0, ge=0, description="Least lead of the chosen answer that simpo aims at, in units of simpo_beta's product."
    )
    offload: Literal["none", "optimizer", "optimizer+weights"] = Field(
        "none",
        description="What is kept, and updated, in the machine's memory instead of the GPU's: slower steps, less GPU "
        "memory. optimizer is for the zero strategies, optimizer+weights for zero3, fsdp and hsdp.",
    )
    tensor_parallel: Positive = Field(
        1, description="Ranks of one node that split each layer between them. For the tp strategies."
    )
    sequence_parallel: bool = Field(
        False,
        description="Ranks that split a layer of the language model share the tokens of each sequence between "
        "its sharded "
        "parts: less memory for activations, at about the same traffic. For the tp strategies.",
    )
    pipeline_parallel: Positive = Field(
        1, description="Ranks that the layers are divided over, in stages. For the pp strategies."
    )
    virtual_stages: Positive = Field(
        1,
        description="Stages on each rank of a pipeline. With 2 or more they are interleaved: ranks wait less for each "
        "other and send more.",
    )
    context_parallel: Positive = Field(
        1,
        description="Ranks that share the tokens of each packed sequence in the language model, for sequences whose "
        "activations do not fit on one: each computes tokens / ranks, and for attention all tokens of heads / ranks "
        "(DeepSpeed-Ulysses). Must divide the language model's attention heads and data.sequence_length. For ddp, "
        "fsdp, hsdp and the zero strategies.",
    )
    epochs: int = Field(
        1,
        ge=0,
        le=MOST_EPOCHS,
        description="Passes over the training split. 0, in variants of a sweep only, evaluates the model as it starts.",
    )
    max_steps: int = Field(0, ge=0, description="Stop after N optimizer steps; 0 trains all epochs.")
    global_batch_size: Positive = Field(description="Packed sequences per optimizer step over all ranks.")
    micro_batch_size: Positive = Field(1, description="Packed sequences per forward pass on one rank.")
    optimizer: OptimizerConfig = Field(description="AdamW settings.")
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Learning rate after warm-up; wsd stays at the peak and falls at the end."
    )
    warmup_fraction: Fraction = Field(0.03, description="Share of steps in which the rate rises linearly from 0.")
    decay_fraction: Fraction = Field(0.2, description="Share of steps at the end in which the rate of wsd falls.")
    final_rate_fraction: Fraction = Field(0.0, description="Rate at the last step as a share of the peak.")
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the trained weights, such as 0.999; 0 keeps none. The "
        "average is what is validated, exported and evaluated; training continues from the weights themselves.",
    )
    clip_grad_norm: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    precision: Precision = Field(
        "bf16",
        description="bf16 computes with bf16 weights, of which the optimizer keeps and updates fp32 masters; frozen "
        "weights are bf16 only. bf16-autocast computes with fp32 weights that each matrix product rounds: more memory. "
        "fp16 does so in fp16, for GPUs without bf16: the loss is scaled, and steps that overflow are skipped.",
    )
    shard_frozen_weights: bool = Field(
        False,
        description="Frozen parts of the model are sharded like trained ones and gathered in each pass: their bytes / "
        "ranks instead of all of them, and more traffic. For fsdp and hsdp; zero3 does so anyway.",
    )
    gradient_accumulation_dtype: StateType = Field(
        "fp32",
        description="Type of the sums of gradients over micro-batches, with precision bf16. bf16 takes 2 bytes a "
        "number less in the optimizer's shard and rounds each sum; for the zero strategies.",
    )
    reduce_dtype: StateType = Field(
        "fp32",
        description="Type in which gradients are summed over ranks, with precision bf16; of ddp and hsdp also over "
        "micro-batches. bf16 sends half the bytes and rounds the sums. On 2 ranks no difference was seen; more were "
        "not tried.",
    )
    reshard_after_forward: ReshardAfterForward = Field(
        "auto",
        description="Whether FSDP frees gathered weights after a forward pass and gathers them again for the backward "
        "pass. auto frees those of layers, never keeps all (more memory, half of the gathers), always frees those "
        "outside of layers too. For fsdp, hsdp and tp; pipeline stages gather once a step and keep all.",
    )
    prefetch_layers: Positive = Field(
        1,
        description="Layers whose weights FSDP gathers ahead of use. More hide slow gathers behind more computing, and "
        "take more memory. For fsdp, hsdp and tp.",
    )
    activation_checkpointing: Checkpointing = Field(
        "none",
        description="full computes each block of the language model again in the backward pass: least memory, about a "
        "third more compute. selective keeps the results of its matrix products and attention, and computes only the "
        "rest again.",
    )
    tower_activation_checkpointing: bool = Field(
        False,
        description="Each layer of a trained vision encoder is computed again in the backward pass, of which only its "
        "input is kept: a fraction of the memory that images take, about a third more compute of the encoder. Without "
        "effect where the tower is frozen.",
    )
    activation_offloading: bool = Field(
        False,
        description="The inputs of blocks, all that activation_checkpointing full keeps of them, wait for the backward "
        "pass in the machine's memory. GPUs copy them beside computing, which hides it where a block takes longer than "
        "its copy. Needs activation_checkpointing full; for all strategies without pipeline stages.",
    )
    loss_chunk_tokens: int = Field(
        1024,
        ge=0,
        description="Label tokens of a micro-batch that have logits at a time; all chunks but one are computed again "
        "in the backward pass. 0 holds all logits at once.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Layers are compiled by torch.compile, each by itself: steps with fewer, larger kernels, after a "
        "slow first one. auto does so on GPUs for models below 3B parameters or micro-batches of at most 4,096 tokens. "
        "For all strategies but zero3.",
    )
    compile_backend: CompileBackend = Field(
        "inductor",
        description="What torch.compile makes of a layer: inductor's fused kernels, or with aot_eager the same "
        "operations as without, to find out what goes wrong.",
    )
    float8: Float8 = Field(
        "none",
        description="Matrix products of language layers, and of a trained tower's, in 8-bit floats (torchao) with one "
        "scale a tensor (tensorwise) or a row (rowwise). Rounded, and about 1.25 and 1.1 times as fast in published "
        "runs. For ddp, fsdp and hsdp with precision bf16, on GPUs of compute capability 8.9 or newer (L4, H100). "
        "Never run on a GPU by this project.",
    )
    gradient_compression: Compression = Field(
        "none",
        description="Number type in which ddp sends gradients between ranks: half the bytes, and sums of rounded "
        "numbers. bf16 has the range of fp32; fp16 loses gradients below 6e-8. The default none sends fp32.",
    )
    zero_hpz: bool = Field(
        False,
        description="Each node keeps a copy of all weights, in slices on its own ranks, for zero3 on several nodes "
        "(ZeRO++'s hpZ): weights travel between nodes once a step instead of twice a micro-batch. A rank takes the "
        "bytes of all weights / ranks of its node more memory.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Laid over the DeepSpeed configuration that is derived from this file, key by key, for the zero "
        "strategies. Keys that this file decides or that would have no effect are refused, all at once; `check` "
        "asks DeepSpeed's own classes about values. The result is in deepspeed.json beside the run.",
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Metrics on Weights & Biases.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="Metrics in MLflow.")
    seed: int = Field(0, description="Seed of the data order.")
    log_every_steps: Positive = Field(10, description="Steps between lines of metrics.jsonl.")
    validate_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between validation losses (validation_loss in metrics.jsonl). One more is taken after the "
        "last step, which evaluate compares with that of the export. 0 takes that one only, on at most 8 sequences.",
    )
    validation_sequences: Positive = Field(
        64, description="Packed sequences of the evaluation split that are validated on, the same ones each time."
    )
    checkpoint_every_steps: Positive = Field(100, description="Steps between checkpoints.")
    keep_checkpoints: Positive = Field(2, description="Newest committed checkpoints to keep.")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto continues from the newest good checkpoint. never gives up the checkpoints of earlier "
        "submissions of the run; restarts of the same submission continue from its own.",
    )
    deterministic: bool = Field(False, description="Deterministic kernels: bit-equal reruns, slower on GPUs.")
    freeze_gc: bool = Field(True, description="Collect garbage between steps only, so that ranks do not stall apart.")
    measure_communication: bool = Field(
        False, description="Time collectives by size, inside a node and across nodes, before training starts."
    )
    profile: ProfileConfig | None = Field(
        None, description="Steps whose operations and collectives are timed, for the run report and TensorBoard."
    )
    stall_factor: float = Field(
        20.0, ge=0, description="End the job when no step is done for this many median steps; 0 never does."
    )
    stall_floor_s: float = Field(
        300.0, gt=0, description="Seconds without a step that are never a stall, whatever train.stall_factor says."
    )

    @property
    def validated_sequences(self) -> int:
        """The most packed sequences of a validation: few where its only use is to compare the export with."""
        few = self.validation_sequences if self.validate_every_steps else MAX_COMPARED_SEQUENCES
        return min(self.validation_sequences, few)

    @property
    def in_pairs(self) -> bool:
        """Whether a sample is a pair of a chosen and a rejected answer."""
        return self.objective != "sft"

    @property
    def has_reference(self) -> bool:
        """Whether pairs are compared with the model that training starts from."""
        return self.objective == "dpo"

    @property
    def compute_type(self) -> ComputeType:
        """Type of the operands of matrix products."""
        return "bf16" if self.precision == "bf16-autocast" else self.precision

    @property
    def has_bf16_weights(self) -> bool:
        """Whether weights that compute are bf16 tensors: trained ones beside their fp32 masters, frozen ones alone."""
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
        """Whether FSDP keeps gathered weights from the forward to the backward pass. Stages of a pipeline do so for all
        micro-batches of a step."""
        return self.reshard_after_forward == "never" or self.strategy in PIPELINE_PARALLEL

    @model_validator(mode="after")
    def _strategy_supports_it(self) -> TrainConfig:
        require_support(self)
        return self

    @model_validator(mode="after")
    def _precision_works(self) -> TrainConfig:
        require_number_types(self)
        return self

    @property
    def rounds_gradients(self) -> bool:
        """Whether gradients travel as numbers of two bytes."""
        return self.gradient_compression in ("bf16", "fp16")

    @model_validator(mode="after")
    def _deepspeed_is_ours_in_part(self) -> TrainConfig:
        if self.deepspeed and not self.strategy.startswith("zero"):
            raise ValueError(
                f"deepspeed has no meaning for strategy {self.strategy}: take it out, or use zero1 to zero3"
            )
        if found := deepspeed_keys.problems(self.deepspeed):
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        if self.lr_schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} are more than all "
                "steps: they share 1 between them"
            )
        return self

    @property
    def rate_scale(self) -> float:
        """What all peak rates are multiplied with for the size of the global batch, where the run file asks for it.

        linear: Goyal et al. 2017, arXiv 1706.02677 (SGD); sqrt: Malladi et al. 2022, arXiv 2205.10782 (Adam).
        """
        if self.optimizer.batch_scaling == "none":
            return 1.0
        ratio = self.global_batch_size / self.optimizer.reference_batch_size
        return ratio if self.optimizer.batch_scaling == "linear" else math.sqrt(ratio)

    @model_validator(mode="after")
    def _scaling_has_a_reference(self) -> TrainConfig:
        scaling, reference = self.optimizer.batch_scaling, self.optimizer.reference_batch_size
        if (scaling == "none") != (reference == 0):
            raise ValueError(
                f"optimizer.batch_scaling {scaling} and optimizer.reference_batch_size {reference}: give both, or none "
                "and 0"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} must be a multiple of micro_batch_size "
                f"{self.micro_batch_size}"
            )
        return self
