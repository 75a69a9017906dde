"""Hooks of features: the places in which training, tracing and export let a feature take part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Layers(Protocol):
    """The layers of a training module, as of `vlmpipe.trainer.models.base.ShardingUnits`."""

    @property
    def language_layers(self) -> Sequence[nn.Module]: ...
    @property
    def tower_layers(self) -> Sequence[nn.Module]: ...


class Weights(Protocol):
    """Weights by their names in the state dict, as of `vlmpipe.trainer.models.base.Weights`."""

    def read(self, name: str) -> Tensor: ...


class WeightsAverage(Protocol):
    """An average of weights that checkpoints hold beside them, and that is validated and exported in their place."""

    averages: list[Tensor]  # of this rank's weights, in their order

    def update(self) -> None:
        """Average in the new weights. Not after a skipped step."""
        ...

    def restart(self, source: str) -> None:
        """Start from the weights loaded from `source`, which holds no average, and print that."""
        ...

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Use the averages as weights inside this context; the weights are restored bit for bit."""
        ...


class Feature:
    """Base of features. A hook that a feature does not override does nothing."""

    family: tuple[str, str] | None = None  # module and class of the model family in place of the run file's
    part = ""  # name of a part of the model that is exported beside the model of transformers

    def require(self, device: torch.device) -> None:
        """Raise UserError or ConfigError, before anything large is built, for what machine or `device` lacks."""

    def change_model(self, model: nn.Module, *, has_values: bool = True) -> None:
        """Change a model whose sizes and digests are known. has_values: False for meta and fake tensors."""

    def quantized_size(self, model: nn.Module) -> tuple[int, int]:
        """Return how many weights `change_model` quantizes, and the bytes that these take then."""
        return 0, 0

    def as_trained(self, initial: Weights, model: nn.Module) -> Weights:
        """Return the initial weights with the values that training sees. model: with adapters."""
        return initial

    def fill_from_data(
        self, model: nn.Module, deferred: Weights | None, first: Callable[[int], Sequence[object]]
    ) -> Weights | None:
        """Set weights that follow from data, in the model or in `deferred`, which it then returns.

        Args:
            first: gives as many first packed sequences of training, the same ones on every rank.
        """
        return deferred

    def save_part(self, part: nn.Module, read: Callable[[str], Tensor], folder: Path) -> None:
        """Write the model's `part` to the export. read: a weight of the whole model by its name."""

    def controls(self, model: ModelConfig) -> tuple[str, ...]:
        """Names of controls of the feature: runs of the evaluation in which it is changed."""
        return ()

    def under_control(self, model: nn.Module, control: str) -> contextlib.AbstractContextManager[None]:
        """Change the model inside this context, for a control of the feature."""
        return contextlib.nullcontext()

    def generation_inputs(
        self, model: nn.Module, inputs: dict[str, object], projected: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> dict[str, object]:
        """Change the family's arguments of `generate`. projected: of all images, whose sizes are in pixels."""
        return inputs

    def warnings(self, train: TrainConfig, total_steps: int) -> Iterator[str]:
        """Yield doubts about the settings, once `total_steps` is known."""
        yield from ()

    def change_layers(self, train: TrainConfig, layers: Layers, device: torch.device) -> str:
        """Change layers before they are compiled and sharded. Returns a line to print, empty for none."""
        return ""

    def pair_loss(self, train: TrainConfig) -> Callable[[Tensor, Any], Tensor] | None:
        """The loss of pairs, a `vlmpipe.trainer.models.loss.pairs.PairLoss`."""
        return None

    def added_loss(self, train: TrainConfig, layers: Layers) -> Callable[[int], Tensor] | None:
        """A further loss of each forward pass in training, from the number of labels or pairs."""
        return None

    def pair_scores(self, job: JobConfig, log_probs: Tensor, tokens: Tensor) -> dict[str, float]:
        """Score validation pairs. log_probs, tokens: (pairs, 2), of the chosen and the rejected answer."""
        return {}

    def average(self, train: TrainConfig, weights: Callable[[], Sequence[Tensor]]) -> WeightsAverage | None:
        """An average of this rank's trained weights, once they are sharded."""
        return None
