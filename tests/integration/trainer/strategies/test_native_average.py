"""The average of a Qwen-VL model's weights, of which each rank holds pieces, is that of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.trainer.equalities import AVERAGED, TOWER_TRAINED, trained_weights
from tests.support.trainer.native_runs import base_of, train
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import make_run
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import GRID_FAMILIES

pytestmark = pytest.mark.slow
RANKS = {"ddp": 1, "tp": 2, "pp": 2, "tp+pp+dp": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], JobConfig]:
    root = tmp_path_factory.mktemp("average")
    base = {family: base_of(root, family) for family in GRID_FAMILIES}
    done = {
        (family, strategy): make_run(
            root,
            f"{family}-{strategy}",
            {**base[family], **strategy_changes(strategy), **TOWER_TRAINED, **AVERAGED, **EVERY_STEP},
            features="off",
        )
        for family in GRID_FAMILIES
        for strategy in RANKS
    }
    train((RANKS[strategy], job) for (_, strategy), job in done.items())
    return done


@pytest.mark.parametrize("strategy", [name for name in RANKS if name != "ddp"])
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_averages_equal_one_process(family: str, strategy: str, runs: dict[tuple[str, str], JobConfig]) -> None:
    job, reference = runs[family, strategy], runs[family, "ddp"]
    averages, weights = (trained_weights(reference, averaged=averaged) for averaged in (True, False))
    assert any("attn.qkv.weight" in name for name in averages)
    assert any(not torch.allclose(averages[name], weight, atol=1e-4) for name, weight in weights.items())
    require_equal_training(job, reference)
