"""LoRA adapters on linear layers of a frozen language model, through peft.

Hu et al. 2021 (arXiv 2106.09685): a layer returns W x + alpha / rank * B A x, and only A (rank, in) and B (out, rank)
are trained. B starts at 0, so that training begins with the original model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config.model import LoraConfig, ModelConfig
from trainer.errors import ConfigError
from trainer.models.layers.freeze import freeze

ADAPTER = "default"  # peft's name for the only one


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight: names of its matrices in the state dict, and its scale."""

    a: str
    b: str
    scale: float

    def merged(self, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """W + scale B A: (out, in), a new tensor."""
        return torch.addmm(weight, read(self.b), read(self.a), alpha=self.scale)


def freeze_and_adapt(
    model: nn.Module, config: ModelConfig, *, unused: Iterable[nn.Module] = (), is_whole: bool
) -> nn.Module:
    """Freeze what the run file says (see `freeze`), and add its adapters."""
    freeze(model, config, unused=unused, is_whole=is_whole)
    if config.lora:
        add_adapters(model.get_decoder(), config.lora)
    return model


def add_adapters(language_model: nn.Module, config: LoraConfig) -> None:
    """Add adapters to the layers that `config.targets` names, drawing A from torch's generator, and freeze the rest.

    Raises ConfigError for a target that is no linear layer in the language model's blocks.
    """
    import peft

    names = _targets(language_model, config.targets)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names, bias="none"
    )
    with torch.device("meta"):  # peft moves drawn weights to the layer's device, which fails for fake tensors
        peft.inject_adapter_in_model(settings, language_model, adapter_name=ADAPTER)
    draw_adapters(language_model, next(language_model.parameters()).device)


def draw_adapters(language_model: nn.Module, device: torch.device) -> None:
    """Give all adapters their first values, from torch's generator."""
    for module in language_model.modules():
        if hasattr(module, "lora_A"):
            for linear in (module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device))
            nn.init.kaiming_uniform_(module.lora_A[ADAPTER].weight, a=5**0.5)  # as peft and the paper's own code do
            nn.init.zeros_(module.lora_B[ADAPTER].weight)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Every adapter in a model, by the name of its weight in the model without adapters."""
    return {
        f"{name}.weight": Adapter(
            a=f"{name}.lora_A.{ADAPTER}.weight", b=f"{name}.lora_B.{ADAPTER}.weight", scale=module.scaling[ADAPTER]
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def adapter_parameters(language_model: nn.Module) -> dict[str, int]:
    """Mean number of adapter parameters in a block, by the name of the adapted layer."""
    counts: Counter[str] = Counter()
    for layer in language_model.layers:
        for name, module in layer.named_modules():
            if hasattr(module, "lora_A"):
                pair = (module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight)
                counts[name] += sum(matrix.numel() for matrix in pair)
    return {name: count // len(language_model.layers) for name, count in counts.items()}


def without_adapters(config: ModelConfig) -> ModelConfig:
    """The exported model: adapters are merged into its weights."""
    return config.model_copy(update={"lora": None, "freeze": tuple(sorted(config.frozen))})


def _targets(language_model: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """Names below the language model. A target is a layer's name within its block, or the last components of one."""
    linear = {
        f"layers.{number}.{name}": name
        for number, layer in enumerate(language_model.layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    kind = language_model.config.model_type
    if not linear:
        raise ConfigError(
            f"the blocks of a {kind} language model have no linear layers that model.lora could adapt",
            fix="leave model.lora out, or take another language model",
        )
    for target in wanted:
        if not any(_matches(target, name) for name in linear.values()):
            raise ConfigError(
                f"model.lora.targets has {target!r}, which no linear layer in the blocks of a {kind} language model is "
                "called",
                expected=f"some of {', '.join(dict.fromkeys(linear.values()))}, or their last parts",
                fix="leave targets out to adapt all of them",
            )
    return [full for full, name in linear.items() if not wanted or any(_matches(target, name) for target in wanted)]


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")
