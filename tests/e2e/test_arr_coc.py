"""The shipped ARR-COC run: a base that reads mosaics, and a module that learns which tokens a question is about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.terminal import Terminal
from vlmpipe.trainer.data.sources.builtin.digit_mosaics import DigitMosaicsSource

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.slow]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_tokens_of_36_answer_as_all_do(tmp_path: Path, seed: int) -> None:
    (tmp_path / "arr-coc.yaml").write_bytes((ROOT / "configs/arr-coc.yaml").read_bytes())
    seeds = [f"model.seed={seed}", f"train.seed={seed}"]
    with Terminal(tmp_path, "run", "arr-coc.yaml", "--run-id", "r1", *seeds) as terminal:
        answer = terminal.answer(deadline_s=1100)
    assert answer.code == 0, answer.said
    run = tmp_path / "runs/runs/r1"
    assert json.loads((run / "decision.json").read_text())["accepted"], answer.said
    found: dict[str, Any] = json.loads((run / "evaluate.json").read_text())
    relevance = found["relevance"]
    assert relevance["target_kept_untrained"] < 0.5 and relevance["target_kept"] > 0.9
    assert relevance["mean_image_tokens"] == 4 and relevance["all_image_tokens"] == 36
    assert found["exact_match"] > found["controls"]["all_tokens"]["exact_match"] - 0.03
    if not seed:
        answers_as_evaluated(run, tmp_path)


def answers_as_evaluated(run: Path, folder: Path) -> None:
    """The example, which loads the export in plain transformers."""
    lines = map(json.loads, (run / "predictions.jsonl").read_text().splitlines())
    predicted = {line["id"]: line for line in lines if "control" not in line}
    samples = (sample for sample in DigitMosaicsSource(0.1, one_question=True) if sample.id in predicted)
    for _, sample in zip(range(3), samples, strict=False):
        (folder / "picture.png").write_bytes(sample.images[0].read())
        question = sample.turns[0].question.rpartition("\n")[2]
        program, picture = ROOT / "examples/arr_coc/answer.py", folder / "picture.png"
        command = [sys.executable, program, run / "export", picture, question]
        said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert said.stdout.splitlines() == [predicted[sample.id]["prediction"], "(4 of 36 visual tokens)"]
