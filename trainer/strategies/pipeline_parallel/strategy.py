"""Pipeline parallelism: ranks hold consecutive stages of the model.

Hidden states are sent forward and their gradients backward, one micro-batch at a time, in torch's 1F1B schedule
(Narayanan et al. 2021, arXiv 2104.04473, 2.2.1). Each stage takes positions, labels and images from its own batches:
all ranks of a model replica read the same sequences. With `train.virtual_stages` a rank holds several non-consecutive
stages under the interleaved schedule (2.2.2). With tensor parallelism (`tp+pp+dp`) several ranks shard each stage, as
in `vlmpipe.trainer.strategies.tensor_parallel.strategy`; each sends its hidden states to one rank of the next stage.

Model replicas shard each stage by FSDP2. Its weights are gathered once a step, when the first micro-batch needs them,
and its gradients are reduced once, after the last.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.layers.bf16 import rest_frozen
from vlmpipe.trainer.models.layers.freeze import in_frozen_parts, is_adapter, part_of
from vlmpipe.trainer.optimizer.build import build_optimizer, set_rates
from vlmpipe.trainer.sizing.pipeline_partition import Stage, schedule_passes, stages_of
from vlmpipe.trainer.strategies.base import StepResult
from vlmpipe.trainer.strategies.fsdp import shard, to_device
from vlmpipe.trainer.strategies.mixed_precision import COMPUTE_TYPES
from vlmpipe.trainer.strategies.pipeline_parallel.gradients import Gradients, Groups
from vlmpipe.trainer.strategies.tensor_parallel.plan import parallelize
from vlmpipe.trainer.strategies.tensor_parallel.replicated_gradients import ReplicatedGradients
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, clear_gradients, reshard


class Pipeline(TorchStrategy):
    """A `Strategy`. It reduces the module to this rank's stages."""

    def __init__(self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext) -> None:
        self._config, self._worker = config, worker
        rest_frozen(module, config.precision)
        layers = len(blocks.language_layers)
        stages = stages_of(layers, config.stages, blocks.sequence_flops, image_layers=blocks.image_layers)
        is_tied, hidden = blocks.is_tied, int(blocks.embedding.weight.shape[1])
        self._groups = Groups(config.pipeline_parallel, config.tensor_parallel, worker, ends=is_tied)
        rank_stages = stages[self._groups.stage :: config.pipeline_parallel]
        views = [blocks.view(stage) for stage in rank_stages] if len(rank_stages) > 1 else [module]
        joined_stage = Stage.joined(rank_stages)
        blocks.reduce_to(joined_stage)
        self._replicated: ReplicatedGradients | None = None
        if config.tensor_parallel > 1:
            mesh, sequence = self._groups.tensor_mesh, config.sequence_parallel
            partial = parallelize(blocks, mesh, joined_stage, sequence=sequence)
            self._replicated = ReplicatedGradients(module, partial, mesh.get_group())
        to_device(module, worker.device)
        self._runners = [
            StageRunner(view, stage, hidden, config, worker.device)
            for view, stage in zip(views, rank_stages, strict=True)
        ]
        for runner in self._runners:
            of_stage = dataclasses.replace(blocks, language_layers=blocks.layers_in(runner.stage), tower_layers=())
            shard(runner, of_stage, config, self._groups.replica_mesh)
        self._gradients = Gradients(module, blocks.embedding.weight if is_tied else None, self._groups)
        super().__init__(module, _optimizer(module, config), config)
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None
        self._loss_factor = 1.0
        # The schedule has a fixed number of micro-batches; an epoch's last step fills up with empty ones.
        in_a_step = config.global_batch_size // (config.micro_batch_size * self._groups.num_replicas)
        self._passes = schedule_passes(in_a_step, config.pipeline_parallel, config.virtual_stages)

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        # FSDP averages over replicas; the loss is a sum over them: multiply by their number.
        self._loss_factor = self.loss_scale.value * self._groups.num_replicas / total_label_tokens
        for runner, runner_batches in zip(self._runners, itertools.tee(batches, len(self._runners)), strict=True):
            runner.take(runner_batches)
        if self._schedule is None:
            self._schedule = self._build_schedule()
        losses: list[Tensor] = []
        self._schedule.step(target=torch.arange(self._passes), losses=losses, return_outputs=False)
        self._gradients.sum_tied()
        if self._replicated:
            self._replicated.combine()
        if self._groups.tensor_rank:  # every rank of a stage has its loss; one returns it
            losses = []
        share = sum((loss.detach() for loss in losses), torch.zeros((), device=self._worker.device))
        return share / (self.loss_scale.value * self._groups.num_replicas)

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        group, ranks, stage = self._groups.pipeline, self._config.pipeline_parallel, self._groups.stage
        passed_on = torch.empty(0)
        for runner in self._runners:
            runner.eval()
        with torch.no_grad():
            for number in range(self._config.stages):
                owner, following = number % ranks, (number + 1) % ranks
                if owner == stage:
                    passed_on = self._runners[number // ranks].evaluate(batch, passed_on)
                if number + 1 == self._config.stages:
                    break
                if owner == stage:
                    dist.send(passed_on.contiguous(), group=group, group_dst=following)
                elif following == stage:
                    passed_on = self._runners[(number + 1) // ranks].room_for(batch)
                    dist.recv(passed_on, group=group, group_src=owner)
        for runner in self._runners:
            runner.train()
            reshard(runner)
        has_loss = stage == ranks - 1 and not self._groups.tensor_rank
        return passed_on if has_loss else torch.zeros((), device=self._worker.device)

    def step(self, rate_factor: float) -> StepResult:
        self.loss_scale.unscale(self._gradients.parameters)
        norm = self._gradients.clip(self._config.clip_grad_norm)
        set_rates(self._optimizer, rate_factor)
        accepted = self.loss_scale.accepts(norm)
        if accepted:
            self._optimizer.step()
        clear_gradients(self._gradients.parameters, keep=False)
        return self.followed(StepResult(norm, skipped=not accepted))

    def _build_schedule(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """torch's schedule. All micro-batches have one shape, for which it allocates receive buffers."""
        first = self._runners[0]
        between = torch.empty(first.shape, dtype=first.sent_dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta")
        stages: list[Any] = [
            PipelineStage(
                runner,
                self._groups.stage + number * self._config.pipeline_parallel,
                self._config.stages,
                self._worker.device,
                input_args=() if runner.stage.is_first else (between,),
                output_args=(loss if runner.stage.is_last else between,),
                group=self._groups.pipeline,
            )
            for number, runner in enumerate(self._runners)
        ]
        scaled: Callable[[Tensor, Tensor], Tensor] = lambda loss, _: loss * self._loss_factor  # noqa: E731
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, self._passes, loss_fn=scaled, scale_grads=False)
        return Schedule1F1B(stages[0], self._passes, loss_fn=scaled, scale_grads=False)


class StageRunner(nn.Module):
    """The module that the schedule runs: one stage, micro-batch after micro-batch.

    It is what FSDP wraps, so that torch's schedule finds FSDP's methods on it.
    """

    def __init__(self, module: nn.Module, stage: Stage, hidden: int, config: TrainConfig, device: torch.device) -> None:
        super().__init__()
        self._module, self.stage, self._hidden, self._config, self._device = module, stage, hidden, config, device
        self._batches: Iterator[PackedBatch | None] = iter(())
        self.shape: tuple[int, int, int] = (0, 0, 0)  # (sequences, tokens, hidden) of the hidden states sent
        self.sent_dtype = COMPUTE_TYPES.get(config.precision, torch.float32)
        self._computed_dtype = _hidden_dtype(module, self.sent_dtype)

    def take(self, batches: Iterator[PackedBatch]) -> None:
        """Take the micro-batches of a step, followed by empty ones, as the schedule comes to them."""
        first = next(batches)
        self._batches = itertools.chain([first], batches, itertools.repeat(None))
        self.shape = (self._config.micro_batch_size, first.input_ids.shape[1], self._hidden)

    def forward(self, *received: Tensor) -> Tensor:
        """Run the next micro-batch: the last stage returns its summed loss, others hidden states of `shape`.

        received: one tensor of `shape`, except in the first stage. In training, missing sequences of a micro-batch are
        zeros.
        """
        batch, max_sequences = next(self._batches), self._config.micro_batch_size
        if batch is None:
            return self._pass_nothing(*received)
        sequences = len(batch.input_ids)
        hidden = received[0][:sequences].to(self._computed_dtype) if received else None
        output: Tensor = self._module(**batch.to(self._device), hidden=hidden)
        if self.stage.is_last:
            return output
        output = output.to(self.sent_dtype)
        if not self.training:
            return output
        if not output.requires_grad:  # all frozen up to here, but the schedule runs a backward pass
            output.requires_grad_()
        return F.pad(output, (0, 0, 0, 0, 0, max_sequences - sequences)) if sequences < max_sequences else output

    def evaluate(self, batch: PackedBatch, received: Tensor) -> Tensor:
        """Run one micro-batch, without padding its sequences. `received` is ignored in the first stage."""
        self._batches = iter([batch])
        output: Tensor = self() if self.stage.is_first else self(received)
        return output

    def room_for(self, batch: PackedBatch) -> Tensor:
        """A receive buffer for `evaluate`."""
        return torch.empty(*batch.input_ids.shape, self._hidden, dtype=self.sent_dtype, device=self._device)

    def _pass_nothing(self, hidden: Tensor | None = None) -> Tensor:
        """Run an empty micro-batch: zeros through all stages."""
        if hidden is None:
            return torch.zeros(self.shape, dtype=self.sent_dtype, device=self._device, requires_grad=True)
        return 0.0 * hidden.sum(dtype=torch.float32) if self.stage.is_last else 0.0 * hidden


def _hidden_dtype(module: nn.Module, computed: torch.dtype) -> torch.dtype:
    """Type of hidden states in a stage's language model: `computed`, or that of its weights where FSDP leaves them."""
    names = module.named_parameters()
    weight = next(parameter for name, parameter in names if part_of(name) == "language_model" and not is_adapter(name))
    return weight.dtype if weight in in_frozen_parts(module) else computed


def _optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    if any(parameter.requires_grad for parameter in module.parameters()):
        return build_optimizer(module, config.optimizer)
    rate = config.optimizer.learning_rate  # a stage whose weights are all frozen
    return torch.optim.AdamW([{"params": [], "lr": rate, "peak_rate": rate}])
