"""The table of strategies has a row for each that a run file may name."""

from __future__ import annotations

from typing import get_args

import pytest

from vlmpipe.trainer.config.strategies import ABILITIES, OFFLOADING, Ability, strategies_with
from vlmpipe.trainer.config.train import TrainConfig


def test_every_strategy_of_a_run_file_has_its_row() -> None:
    assert set(ABILITIES) == set(get_args(TrainConfig.model_fields["strategy"].annotation))


@pytest.mark.parametrize("ability", get_args(Ability))
def test_an_ability_is_one_that_some_strategies_have_and_others_lack(ability: Ability) -> None:
    assert set() < set(strategies_with(ability)) < set(ABILITIES)


def test_offloads_are_those_that_a_run_file_may_ask_for() -> None:
    assert {"none", *OFFLOADING} == set(get_args(TrainConfig.model_fields["offload"].annotation))
