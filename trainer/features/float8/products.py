"""Matrix products in 8-bit floats (`train.float8`), by torchao.

Inputs, weights and gradients of a product are cast with scales of their own in each pass. Weights and optimizer state
stay as they are, so checkpoints and exports do not know of it.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import nn

from vlmpipe.trainer.config.compiling import MIN_FOR_FLOAT8
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_options import Float8
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.hooks.feature import Feature, Layers
from vlmpipe.trainer.models.layers.freeze import is_adapter

SIDES = 16  # the GPU's products take matrices whose sides are multiples of it


class Float8Products(Feature):
    """Has linear layers multiply in 8-bit floats."""

    def require(self, device: torch.device) -> None:
        require_float8(device)

    def change_layers(self, train: TrainConfig, layers: Layers, device: torch.device) -> str:
        assert train.float8 != "none", "only a run file that asks for a feature gets its hooks called"
        count = compute_in_float8(layers, train.float8, device)
        return f"float8 {train.float8} in {count} linear layers of the language model"


def compute_in_float8(blocks: Layers, recipe: Float8, device: torch.device) -> int:
    """Have linear layers of blocks multiply in float8. Returns how many. Call it before a strategy changes the module.

    Left out: what is outside of blocks (embedding, projector, head), adapters, sides that are no multiples of 16, and
    a frozen tower, whose output must equal that of cached features. Raises UserError (69) without torchao, ConfigError
    where nothing is left or the GPU has no such products. CPUs emulate them, for tests.
    """
    require_float8(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=device.type == "cpu")
    towers = [
        layer for layer in blocks.tower_layers if any(parameter.requires_grad for parameter in layer.parameters())
    ]
    for layer in itertools.chain(blocks.language_layers, towers):
        convert_to_float8_training(layer, config=config, module_filter_fn=_multiplies_in_float8)
    count = sum(
        type(module).__name__ == "Float8Linear" for layer in blocks.language_layers for module in layer.modules()
    )
    if not count:
        raise ConfigError(
            f"train.float8 {recipe}: no linear layer of the language model has sides that are multiples of {SIDES}",
            fix="set train.float8 to none",
        )
    return count


def require_float8(device: torch.device) -> None:
    """Raise UserError where torchao is not installed, ConfigError for a GPU without products of 8-bit floats."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < tuple(int(part) for part in str(MIN_FOR_FLOAT8).split(".")):
            raise ConfigError(
                f"train.float8 does not work on {torch.cuda.get_device_name(device)}, of compute capability "
                f"{major}.{minor}",
                expected=f"{MIN_FOR_FLOAT8} or newer: L4, H100, H200, B200",
                fix="set train.float8 to none, or take another cluster.accelerator_type",
            )
    require_torchao()


def require_torchao() -> None:
    """Raise UserError (exit 69) where it is not installed."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"train.float8 needs torchao: {error}",
            expected="torchao, which casts to 8-bit floats and multiplies them",
            fix="pip install 'vlmpipe[float8]', or set train.float8 to none",
            code=ExitCode.UNAVAILABLE,
        ) from error


def _multiplies_in_float8(module: nn.Module, name: str) -> bool:
    # By exact type: 4-bit layers and others that compute in their own way are subclasses.
    return (
        type(module) is nn.Linear
        and not is_adapter(f"{name}.")
        and not any(side % SIDES for side in module.weight.shape)
    )


FEATURE = Float8Products()
