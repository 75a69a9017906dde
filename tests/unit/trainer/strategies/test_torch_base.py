"""Contents of a checkpoint of a torch strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, second_names


class Tied(nn.Module):
    """An embedding that is the head too, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_matrix_with_two_names_is_written_once_and_a_frozen_one_never(frozen: bool, tmp_path: Path) -> None:
    model = Tied()
    model.embedding.weight.requires_grad_(not frozen)
    assert second_names(model) == ["head.weight"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    strategy = TorchStrategy(model, torch.optim.AdamW(trained), TrainConfig.model_validate(TINY["train"]))
    model.head(model.layer(model.embedding(torch.arange(5)))).sum().backward()
    strategy._optimizer.step()
    strategy.snapshot(tmp_path, None)()  # type: ignore[arg-type]  # one process
    names = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    assert weights == ({"layer.weight"} if frozen else {"layer.weight", "embedding.weight"})
