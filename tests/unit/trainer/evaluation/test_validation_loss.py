"""Sequences of a validation by source hold the same samples, and no more of them than fit; and the export's loss is
compared with that of training: the same weights, on the same tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.evaluation.validation_loss import as_in_training, by_source
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines

ROOM = 6
STEP, TOKENS, LOSS = 40, 700, 1.5
LINES = [
    {"step": 20, "validation_loss": 3.0, "validation_label_tokens": TOKENS},
    {"step": 30},
    {"step": STEP, "validation_loss": LOSS, "validation_label_tokens": TOKENS},
]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=ROOM), max_size=12))
def test_each_sequence_is_of_one_source_and_within_the_budget(rows: list[list[int]]) -> None:
    def source_of(sample: int) -> str:
        return "abc"[sample % 3]

    found = by_source(rows, source_of, lambda samples: len(samples) <= ROOM)
    assert list(found) == sorted(found)
    for source, of_source in found.items():
        assert all(row and len(row) <= ROOM for row in of_source)
        assert {source_of(sample) for row in of_source for sample in row} == {source}
        assert len(of_source) <= sum(any(source_of(sample) == source for sample in row) for row in rows)
    given_samples = Counter(sample for row in rows for sample in row)
    assert Counter(sample for of_source in found.values() for row in of_source for sample in row) == given_samples


def compared(
    folder: Path, precision: str, lines: list[dict[str, Any]] = LINES, dtype: str = "auto", **changes: Any
) -> dict[str, float]:
    section = merged(TINY, {"train.precision": precision, "checkpoint.export_dtype": dtype}) | {
        "run": {"run_id": "r", "root_uri": str(folder)}
    }
    job = JobConfig.model_validate(section)
    open_storage(job.run.run_uri).write("metrics.jsonl", seal_lines(lines))
    given = {"step": STEP, "averaged": False, "loss": LOSS, "label_tokens": TOKENS} | changes
    return as_in_training(job, given.pop("step"), **given)


@pytest.mark.parametrize(
    ("precision", "difference"), [("fp32", 0.015), ("bf16", 0.09), ("bf16-autocast", 0.09), ("fp16", 0.09)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_rounding_explains_is_recorded_and_more_ends_the_step(
    precision: str, difference: float, sign: int, tmp_path: Path
) -> None:
    found = compared(tmp_path, precision, loss=LOSS + sign * difference)
    assert found == {
        "step": STEP, "label_tokens": TOKENS, "loss_in_training": LOSS, "loss_of_export": LOSS + sign * difference
    }  # fmt: skip
    with pytest.raises(UserError, match=r"had 1\.50000 after step 40 on the same 700 label tokens") as caught:
        compared(tmp_path, precision, loss=LOSS + sign * 1.2 * difference)
    assert caught.value.code == ExitCode.BAD_EXPORT


def test_an_export_in_bf16_of_a_training_in_fp32_is_rounded(tmp_path: Path) -> None:
    assert compared(tmp_path, "fp32", dtype="bf16", loss=LOSS + 0.09)
    with pytest.raises(UserError, match="has a validation loss") as caught:
        compared(tmp_path, "fp32", dtype="bf16", loss=LOSS + 0.11)
    assert "rounding in bf16" in caught.value.expected


def test_a_loss_that_is_no_number_ends_the_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a validation loss of nan"):
        compared(tmp_path, "bf16", loss=float("nan"))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 30},
        {"step": 50},
        {"label_tokens": TOKENS + 1},  # other data, or another number of sequences
        {"averaged": True},
        {"lines": LINES[:2]},
        {"lines": [LINES[2] | {"ema_decay": 0.9}]},
        {"lines": [{"step": STEP, "validation_loss": LOSS}]},  # of a training program of one's own
    ],
)
def test_other_weights_and_other_tokens_are_not_compared(changes: dict[str, Any], tmp_path: Path) -> None:
    assert compared(tmp_path, "fp32", **{"loss": 9.0, **changes}) == {}


def test_averages_are_compared_with_averages(tmp_path: Path) -> None:
    lines = [LINES[2] | {"ema_decay": 0.9}]
    assert compared(tmp_path, "fp32", lines, averaged=True)["loss_in_training"] == LOSS
