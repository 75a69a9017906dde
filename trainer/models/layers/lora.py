"""LoRA adapters on linear layers and experts of frozen parts of a model, through peft.

Hu et al. 2021 (arXiv 2106.09685): a layer returns W x + alpha / rank * B A x, and only A (rank, in) and B (out, rank)
are trained. B starts at 0, so that training begins with the original model. rsLoRA (arXiv 2312.03732) scales by alpha /
sqrt(rank). DoRA (arXiv 2402.09353) also trains the lengths m of the rows of V = W + scale * B A: the weight is
m * V / |V|, and m starts at |W|.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.models.layers.adapter_targets import Targets, targets_of
from vlmpipe.trainer.models.layers.experts import compute_weights, factors
from vlmpipe.trainer.models.layers.freeze import plain_name, tied_names
from vlmpipe.trainer.models.loss.chunked_loss import TRAINED_ROWS, trained_rows_of

if TYPE_CHECKING:
    import peft

# peft imports bitsandbytes, which then warns that its kernels for CPUs are not installed; nothing here needs them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

ADAPTER = "default"  # peft's name for the only one
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight: names of its tensors in the state dict, and its scale."""

    a: str
    b: str
    magnitude: str  # empty without DoRA
    scale: float
    is_transposed: bool = False  # of experts: (experts, in, out)

    def merged(self, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """W + scale B A, with DoRA's row lengths: (out, in) or that of each expert, a new tensor."""
        if weight.ndim > 2:
            pair = factors(read(self.a), read(self.b), len(weight), is_transposed=self.is_transposed)
            return torch.baddbmm(weight, *pair, alpha=self.scale)
        merged = torch.addmm(weight, read(self.b), read(self.a), alpha=self.scale)
        return merged * (read(self.magnitude) / row_lengths(merged))[:, None] if self.magnitude else merged


def row_lengths(weight: Tensor) -> Tensor:
    """(out, in) -> (out,)"""
    return torch.linalg.norm(weight, dim=1)


def add_adapters(model: nn.Module, config: LoraConfig, *, unused: Iterable[nn.Module] = ()) -> None:
    """Add adapters to the layers that `config` names, drawing A from torch's generator, and freeze the rest.

    Raises ConfigError for a target that is no linear layer of `config.parts`, and where PEFT adapts other layers.
    """
    with collector_off():  # it loads bitsandbytes and torch's compiler
        import peft

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    targets = targets_of(model, config, unused)
    try:
        with torch.device("meta"):  # peft moves drawn weights to the layer's device, which fails for fake tensors
            peft.inject_adapter_in_model(peft_settings(config, targets), model, adapter_name=ADAPTER)
    except ValueError as error:  # of what it takes for experts, without DoRA and dropout
        raise _adapts_others(model, str(error).rstrip(".")) from error
    _require_adapted(model, targets)
    for outer in model.modules():
        if hasattr(outer, "parameter_name"):
            compute_weights(outer, outer.get_base_layer())
    for parameter in trained:
        parameter.requires_grad_(True)  # peft freezes all but adapters
    draw_adapters(model, next(model.parameters()).device)


def _require_adapted(model: nn.Module, targets: Targets) -> None:
    """Raise ConfigError where PEFT has not adapted exactly these layers and experts.

    For some types it takes layers for experts, by their names, and adapts the experts' parameters instead.
    """
    adapted = {weight_name(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")}
    needed = {f"{name}.weight" for name in targets.layers} | set(targets.experts)
    if adapted == needed:
        return
    names = [min(some).removesuffix(".weight") for some in (adapted - needed, needed - adapted) if some]
    raise _adapts_others(model, f"{' and '.join(names)} differ")


def weight_name(name: str, module: nn.Module) -> str:
    """The name of the weight that an adapted module (or one of PEFT's wrappers of experts) adapts."""
    return plain_name(f"{name}.{getattr(module, 'parameter_name', 'weight')}")


def _adapts_others(model: nn.Module, how: str) -> ConfigError:
    return ConfigError(
        f"PEFT adapts other layers of a {model.config.model_type} model than model.lora names: {how}",
        expected="adapters of the linear layers and experts that model.lora names, and of no others",
        fix="set model.lora.targets to the layers of the attention, such as [q_proj, k_proj, v_proj, o_proj], or leave "
        "use_dora and dropout out",
    )


def peft_settings(config: LoraConfig, targets: Targets) -> peft.LoraConfig:
    """peft's own settings."""
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=list(targets.layers),
        target_parameters=list(targets.experts) or None,
        bias="none",
    )


def draw_adapters(model: nn.Module, device: torch.device) -> None:
    """Give all adapters their first values, from torch's generator. Row lengths of weights on the meta device stay
    there (`vlmpipe.trainer.models.layers.deferred_weights`)."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            for linear in (module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device))
            nn.init.kaiming_uniform_(module.lora_A[ADAPTER].weight, a=5**0.5)  # as peft and the paper's own code do
            nn.init.zeros_(module.lora_B[ADAPTER].weight)
            if ADAPTER in module.lora_magnitude_vector:
                lengths = row_lengths(module.base_layer.weight.detach())
                module.lora_magnitude_vector[ADAPTER].weight = nn.Parameter(lengths)


def train_rows_only(model: nn.Module, tokens: Sequence[int]) -> None:
    """Have only these tokens' rows of embedding and head get gradients (`model.lora.train_tokens`); those of the others
    are 0. Both matrices stay parameters as a whole, so that every strategy shards and saves them as any other.

    Call it before a strategy changes the model. AdamW leaves a row without gradients as it is, where nothing decays:
    see `vlmpipe.trainer.optimizer.build`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for layer in (embedding, head):
        device = "cpu" if layer.weight.is_meta else layer.weight.device
        layer.register_buffer(TRAINED_ROWS, torch.tensor(tokens, device=device), persistent=False)
    embedding.register_forward_hook(_only_trained_rows)


def _only_trained_rows(embedding: nn.Module, tokens: tuple[Tensor], embedded: Tensor) -> Tensor:
    rows = trained_rows_of(embedding)
    assert rows is not None
    is_trained = torch.isin(tokens[0], rows).unsqueeze(-1)
    return torch.where(is_trained, embedded, embedded.detach())


def rows_in(model: nn.Module) -> dict[str, Tensor]:
    """Trained embeddings and heads of which only some rows are trained -> those; a tied head's are the embedding's."""
    layers = {f"{name}.weight": trained_rows_of(module) for name, module in model.named_modules()}
    copies = tied_names(model)
    return {name: rows for name, rows in layers.items() if rows is not None and name not in copies}


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Every adapter in a model, by the name of its weight in the model without adapters."""
    return {
        weight_name(name, module): Adapter(
            a=f"{name}.lora_A.{ADAPTER}.weight",
            b=f"{name}.lora_B.{ADAPTER}.weight",
            magnitude=f"{name}{MAGNITUDE}" if ADAPTER in module.lora_magnitude_vector else "",
            scale=module.scaling[ADAPTER],
            is_transposed=getattr(module.get_base_layer(), "is_transposed", False),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def without_adapters(config: ModelConfig) -> ModelConfig:
    """The exported model: adapters are merged into its weights."""
    return config.model_copy(update={"lora": None, "freeze": tuple(sorted(config.frozen))})
