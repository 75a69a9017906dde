"""Trains several runs in one process group, and looks at this rank's part of every frozen weight before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import vlmpipe.trainer.setup.strategy
from tests.support.drivers import train_many
from vlmpipe.trainer.distributed.process import run_worker

Watched = list[tuple[nn.Module, dict[str, Tensor]]]


def watched(build: Any, kept: Watched) -> Any:
    def building(config: Any, module: nn.Module, *others: Any) -> Any:
        strategy = build(config, module, *others)
        kept.append((module, {name: part.clone() for name, part in frozen_of(module).items()}))
        return strategy

    return building


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """What lies on this rank: of FSDP's and of ZeRO-3's a slice."""
    return {name: _local(one).detach() for name, one in module.named_parameters() if not one.requires_grad}


def _local(parameter: Any) -> Tensor:
    found: Tensor = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
    return found


def main() -> int:
    kept: Watched = []
    vlmpipe.trainer.setup.strategy.strategy_of = watched(vlmpipe.trainer.setup.strategy.strategy_of, kept)
    code = train_many.main()
    assert any(before for _, before in kept), "some weights must be frozen"  # not in each stage of a pipeline
    for module, before in kept:
        after = frozen_of(module)
        assert before.keys() == after.keys()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert not changed, f"frozen weights changed: {changed}"
    return code


if __name__ == "__main__":
    run_worker(main)
