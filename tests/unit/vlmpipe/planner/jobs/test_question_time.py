"""GPU time of a served question: the prompt's products, and a share of the weights' reads for each token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.planner.configs import A100_80, LLAVA_7B, machine, run_config
from vlmpipe.planner.jobs.question_time import (
    QUESTIONS_AT_ONCE,
    prompt_seconds,
    question_seconds,
    weights_seconds,
)
from vlmpipe.planner.jobs.shared_prompts import MeanPrompt
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.workload import Workload


def case(**run: Any) -> Scenario:
    config = run_config(**run)
    return Scenario(config, LLAVA_7B, layout_of(config), Workload.assumed(config, LLAVA_7B), machine(), A100_80)


def test_each_token_of_an_answer_adds_its_share_of_a_read_of_the_weights() -> None:
    short, long = case(evaluate__max_new_tokens=16), case(evaluate__max_new_tokens=80)
    read_s = weights_seconds(LLAVA_7B, short.config.train.precision, A100_80)
    added = question_seconds(long, A100_80, 1) - question_seconds(short, A100_80, 1)
    assert added == pytest.approx(64 * read_s / QUESTIONS_AT_ONCE)
    assert weights_seconds(LLAVA_7B, "fp32", A100_80) == pytest.approx(2 * weights_seconds(LLAVA_7B, "bf16", A100_80))


def test_gpus_of_a_replica_share_the_time_and_cached_features_leave_the_encoder_out() -> None:
    run, prompt = case(), MeanPrompt(740, 0.94, 740**2)
    assert question_seconds(run, A100_80, 4) == pytest.approx(question_seconds(run, A100_80, 1) / 4)
    assert prompt_seconds(run, A100_80, prompt, cached=True) < prompt_seconds(run, A100_80, prompt, cached=False)
