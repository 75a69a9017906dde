from __future__ import annotations

import pytest

from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.importing.sources import source_of
from vlmpipe.importing.yaml_aliases import parse_with_aliases
from vlmpipe.trainer.errors import ConfigError


def test_aliases_and_merged_mappings_stand_for_their_values() -> None:
    text = "base: &b {a: 1, c: [x]}\nsame: *b\nother: {<<: *b, a: 2}\n"
    assert parse_with_aliases(text, "f") == {
        "base": {"a": 1, "c": ["x"]}, "same": {"a": 1, "c": ["x"]}, "other": {"a": 2, "c": ["x"]}
    }  # fmt: skip


def test_words_stay_those_of_yaml_1_2() -> None:
    assert parse_with_aliases("a: &x on\nb: *x\nc: 1e-4\n", "f") == {"a": "on", "b": "on", "c": 1e-4}


def test_aliases_that_stand_for_much_are_refused_before_they_are_read() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60))]
    with pytest.raises(ConfigError, match="stand for more than"):
        source_of("\n".join(lines), "f.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [*a]\n", "part of itself"),
        ("a: *nothing\n", "undefined alias"),
        ("a: &x 1\na: *x\n", "given twice"),
        ("a: &x 1\n? [b]\n: *x\n", "a key must be text"),
        ("a: &x 1\nb: *x\nc: " + "[" * 400 + "]" * 400, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        parse_with_aliases(text, "f")
