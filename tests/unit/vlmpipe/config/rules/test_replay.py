"""Refusals of a source with the start model's answers."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.errors import ConfigError

RUN_FILE = ROOT / "tests/fixtures/run_files/digits-replay.yaml"
OWN = "{name: a, uri: 'builtin:digits'}"
PART = "{weights: gs://example-bucket/models/tiny-llava}"


def test_a_start_from_weights_is_taken() -> None:
    replay = load_run_file(RUN_FILE).data.replay
    assert replay and replay.address == "replay:self" and len(replay.replay_prompts) > 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.pretrained=null", f"model.tower={PART}", f"model.language_model={PART}"], "model.projector drawn"),
        (["model.tokenizer=train:300"], "whose model knows another one"),
        (["train.objective=dpo"], "needs rejected answers"),
        (["train.trainer={name: mine, command: [python, train.py]}"], "does not generate with"),
        (["stages=[{name: one}, {name: two}]"], "a model that is not there yet"),
        (["sweep={grid: {train.epochs: [1, 2]}}"], "whose answers its jobs do not generate"),
        (["data.sources=[{name: before, replay: self}]"], "expected one, beside sources with images"),
        (["data.sources=[{name: a, uri: 'builtin:digits'}, {name: b, replay: self, max_samples: 3}]"], "max_samples"),
        (["data.sources=[{name: a, uri: 'builtin:digits', replay_seed: 1}]"], "replay_seed without replay"),
        (["data.sources=[{name: a, uri: 'builtin:digits'}, {name: b}]"], "has no uri"),
        (
            [f"data.sources=[{OWN}, {{name: b, replay: self, replay_about: start_data, replay_prompts: ['a?']}}]"],
            "whose questions are asked",
        ),
        ([f"data.sources=[{OWN}, {{name: b, replay: self, replay_prompts: ['<image> a?']}}]"], "without <image>"),
    ],
)
def test_what_could_not_be_generated_is_refused_in_words(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_run_file(RUN_FILE, overrides)
