"""The average of a Qwen-VL model's weights, of which each rank holds pieces, is that of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.short_form import only_whole
from tests.support.trainer.equalities import AVERAGED, RELATIVE, TOWER_TRAINED, trained_weights
from tests.support.trainer.native_runs import base_of, train
from tests.support.trainer.runs import losses, make_run
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import GRID_FAMILIES

pytestmark = [pytest.mark.slow, only_whole]
RANKS = {"ddp": 1, "tp": 2, "pp": 2, "tp+pp+dp": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], JobConfig]:
    root = tmp_path_factory.mktemp("average")
    base = {family: base_of(root, family) for family in GRID_FAMILIES}
    done = {
        (family, strategy): make_run(
            root,
            f"{family}-{strategy}",
            {**base[family], **strategy_changes(strategy), **TOWER_TRAINED, **AVERAGED},
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
    assert losses(job) == pytest.approx(losses(reference), rel=RELATIVE)
    averages, expected = (trained_weights(each, averaged=True) for each in (job, reference))
    weights = trained_weights(reference)
    assert averages.keys() == expected.keys() and any("attn.qkv.weight" in name for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(averages[name], tensor, rtol=1e-4, atol=2e-5)
    assert any(not torch.allclose(expected[name], weight, atol=1e-4) for name, weight in weights.items())
