"""AdamW with moments in 8 bits for large matrices, by bitsandbytes' block-wise kernels.

Dettmers et al. 2022 (arXiv 2110.02861): a moment is stored as one of 256 levels times the largest magnitude of its
block of 256 numbers: 2 x 1.016 bytes a parameter instead of 8. Blocks lie within rows, so sharding a matrix by rows
cuts no block. Checkpoints hold dequantized moments by parameter name, and quantizing these again gives the same bytes:
a run resumes exactly on any number of ranks, and with or without 8-bit moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.sizing.optimizer_state import BLOCK

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(torch.optim.AdamW):
    """AdamW whose parameter groups with `state_bits` 8 have moments in 8 bits; all others are torch's own."""

    def __init__(self, groups: list[dict[str, object]], *, betas: tuple[float, float], eps: float) -> None:
        """Raises UserError (exit 69) where bitsandbytes is not installed."""
        try:
            from bitsandbytes.functional import create_dynamic_map
        except ImportError as error:
            raise UserError(
                f"train.optimizer.name adamw_8bit needs bitsandbytes: {error}",
                expected="bitsandbytes, whose kernels update 8-bit moments",
                fix="pip install 'vlmpipe[qlora]', or use train.optimizer.name adamw",
                code=ExitCode.UNAVAILABLE,
            ) from error
        super().__init__(groups, betas=betas, eps=eps, fused=True)
        self._levels = [create_dynamic_map(signed=signed) for signed in (True, False)]
        # The map ends at -0.993. With -1 in its place a block's largest magnitude is a level whatever its sign, so that
        # quantizing dequantized moments again changes no bit.
        self._levels[0][0] = -1.0
        self._moments: dict[Tensor, list[_Moment]] = {}
        # Updates made of each 8-bit parameter, which the kernel takes as a number. A tensor would do until a state is
        # loaded: torch moves the counts of a fused optimizer to the GPU, and each step would wait for every one.
        self._steps: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["state_bits"] == 32]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in self._groups_8bit():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def state_dict(self) -> dict[str, object]:
        """Return the state in the form of torch's AdamW, with dequantized moments in CPU memory."""
        content: dict[str, Any] = super().state_dict()
        for key, parameter in self._keyed(content):
            if parameter in self._moments:
                entry = dict(content["state"][key]) | {"step": torch.tensor(float(self._steps[parameter]))}
                for name, moment in zip(MOMENTS, self._moments[parameter], strict=True):
                    entry[name] = _like(parameter, moment.dequantized())
                content["state"][key] = entry
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the state of any AdamW over these parameters."""
        state = dict(state_dict["state"])
        for key, parameter in self._keyed(state_dict):
            if key in state:
                entry = dict(state[key])
                for moment, name in zip(self._moments_of(parameter), MOMENTS, strict=True):
                    moment.quantize(_local(entry.pop(name)))
                self._steps[parameter] = int(entry["step"])
                state[key] = entry
        super().load_state_dict({**state_dict, "state": state})

    def moment_tensors(self) -> list[Tensor]:
        """Codes and scales of the 8-bit moments on this rank."""
        moments = [moment for pair in self._moments.values() for moment in pair]
        return [tensor for moment in moments for tensor in (moment.codes, moment.scales)]

    def _groups_8bit(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["state_bits"] == 8]

    def _keyed(self, content: dict[str, Any]) -> list[tuple[object, nn.Parameter]]:
        """8-bit parameters by their keys in a state dict: numbers, or names in one of torch.distributed.checkpoint."""
        keys = [key for group in content["param_groups"] for key in group["params"]]
        parameters = [(group["state_bits"], parameter) for group in self.param_groups for parameter in group["params"]]
        return [(key, parameter) for key, (bits, parameter) in zip(keys, parameters, strict=True) if bits == 8]

    def _moments_of(self, parameter: nn.Parameter) -> list[_Moment]:
        if parameter not in self._moments:
            self._moments[parameter] = [_Moment(_local(parameter), levels) for levels in self._levels]
        return self._moments[parameter]

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        gradient = parameter.grad
        assert gradient is not None
        step = self._steps[parameter] = self._steps.get(parameter, 0) + 1
        # torch.distributed.checkpoint makes a step of an optimizer that has no state yet; `state_dict` has the count.
        self.state[parameter].setdefault("step", torch.zeros(()))
        weight, first, second = _local(parameter), *self._moments_of(parameter)
        if not weight.numel():
            return  # of this rank's shard
        beta1, beta2 = group["betas"]
        optimizer_update_8bit_blockwise(
            "adam",
            _local(gradient),
            weight,
            first.codes,
            second.codes,
            beta1,
            beta2,
            0.0,
            0.0,
            group["eps"],
            step,
            group["lr"],
            first.levels,
            second.levels,
            first.scales,
            second.scales,
            weight_decay=group["weight_decay"],
        )


class _Moment:
    """One moment of this rank's share of a parameter."""

    def __init__(self, weight: Tensor, levels: Tensor) -> None:
        self.codes = torch.zeros_like(weight, dtype=torch.uint8)
        self.scales = torch.zeros(-(-weight.numel() // BLOCK), dtype=torch.float32, device=weight.device)
        self.levels = levels.to(weight.device)
        self.quantize(torch.zeros(weight.shape))

    def dequantized(self) -> Tensor:
        """fp32, in the CPU's memory, where it is computed too: no GPU has room for it."""
        codes, scales, levels = self.codes.cpu(), self.scales.cpu(), self.levels.cpu()
        numbers = levels[codes.flatten().long()].view(-1, BLOCK) * scales[:, None]
        return numbers.view(codes.shape)

    def quantize(self, numbers: Tensor) -> None:
        """Store the nearest levels of `numbers`, which are this rank's share."""
        blocks = numbers.detach().float().cpu().reshape(-1, BLOCK)
        scales, levels = blocks.abs().amax(dim=1), self.levels.cpu()
        shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        # Not by bitsandbytes: on the CPU it misses the levels next to zero.
        codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's share as a tensor that is sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
