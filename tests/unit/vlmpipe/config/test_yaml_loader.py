"""Reading a run file: libyaml's parser in the place of PyYAML's own changes nothing but the time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from vlmpipe.config.overrides import apply_overrides, parse_overrides
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.yaml_loader import LARGEST_FILE_BYTES, RunFileLoader, compose, parse_yaml, read_run_file
from vlmpipe.trainer.errors import ConfigError, UserError

FILES = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "vlmpipe/catalog").glob("*.yaml"))]
STRANGE = """# é 🎉
name: größe 🎉 x   # of the file
quoted: {image_uri: 'it''s', escaped: "\\u00e9 d", on: off, number: 1e-4, time: 1:30}
list:
  - ü
  - |
    block é
    two
  - >-
    folded

    more
empty:
last: end"""


class InPython(yaml.SafeLoader):
    """PyYAML's own parser with the run file's rules for numbers and truth."""

    yaml_implicit_resolvers = RunFileLoader.yaml_implicit_resolvers


def nodes(node: yaml.Node | None) -> list[Any]:
    """Kind, value and place of a node and of all below it, as far as `make build` uses them to edit a file."""
    assert node
    place = (node.start_mark.index, node.start_mark.line, node.start_mark.column)
    if isinstance(node, yaml.ScalarNode):
        return [(node.tag, node.value, place, node.end_mark.index)]
    inner = [each for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,))]
    return [(node.tag, place), *(found for each in inner for found in nodes(each))]


@pytest.mark.parametrize(
    "text", [STRANGE, *(file.read_text() for file in FILES)], ids=["strange", *(file.stem for file in FILES)]
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_both_yaml_parsers_give_the_same_values_and_errors(text: str, line_end: str) -> None:
    text = text.replace("\n", line_end)
    assert nodes(compose(text)) == nodes(yaml.compose(text, Loader=InPython))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["a FIFO", "a loop of symbolic links", "a character device"])
def test_a_special_file_is_refused_as_run_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "a character device" else path.name)
    with pytest.raises(ConfigError, match=f"{path} is {kind}, not a run file"):
        read_run_file(path)


TAGGED = ("int", "float", "bool", "null", "str", "timestamp", "binary", "set", "omap", "pairs")
TAGS = ["", *(f"!!{name} " for name in TAGGED)]


@given(tag=st.sampled_from(TAGS), scalar=st.text(max_size=30))
@example(tag="!!int ", scalar="abc")
@example(tag="!!timestamp ", scalar="nope")
@example(tag="!!bool ", scalar="perhaps")
@example(tag="", scalar="9" * 5000)
@example(tag="", scalar="1e" + "9" * 400)
@example(tag="!!python/object/apply:os.system ", scalar="[echo]")
@example(tag="", scalar="\ud800")
def test_any_text_gives_a_value_or_an_error_message(tag: str, scalar: str) -> None:
    try:
        parse_yaml(f"a: {tag}{scalar}", "x.yaml")
    except UserError as error:
        assert "x.yaml" in error.text()


@given(st.lists(st.text(max_size=40), max_size=4))
@example(["train.epochs=!!int abc"])
@example(["model.seed=" + "9" * 5000])
@example(["data.source=\udcff\udcfe.json"])
@example(["data.source=a\0b"])
def test_any_override_gives_a_value_or_an_error_message(texts: list[str]) -> None:
    try:
        apply_overrides({"train": {"epochs": 1}}, parse_overrides(texts))
    except UserError as error:
        assert error.code == 64


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nname: b\n", "line 2, column 1.*name is given twice"),
        ("a: [1\n", "not valid YAML"),
        ("a: &x 1\nb: *x\n", "aliases"),
        ("1: a\n", "a key must be text"),
        ("", "is empty"),
        ("- a\n", "is a list"),
        (b"\xff\xfe", "is not text"),
        ("a: " + "[" * 20000, "nested too deep|not valid YAML"),
        ("#" * (LARGEST_FILE_BYTES + 1), "bytes"),
        ("a: !!python/object/apply:os.system [x]\n", "not valid YAML"),
    ],
)
def test_an_unreadable_run_file_is_refused_with_a_message(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run_file(write(tmp_path, text))


def test_a_missing_run_file_names_the_closest_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        load_run_file("configs/digit.yaml")
    assert caught.value.fix.startswith("in configs/: configs/digits.yaml, ")
    with pytest.raises(ConfigError, match="is a folder"):
        load_run_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("yes", "yes"), ("true", True), ("1e-4", 1e-4), ("5", 5), ("1:30", "1:30"), ("012", 12.0),
        ("2026-12-01", "2026-12-01"), ("null", None), ("~", None), ("[a, 1]", ["a", 1]), ("nan", "nan"),
    ],
)  # fmt: skip
def test_plain_values_read_as_in_yaml_1_2(text: str, value: Any) -> None:
    assert parse_yaml(text, "x") == value


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cn", "Cs"))),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("abc_", min_size=1), inner),
        max_leaves=8,
    )
)
def test_json_is_valid_yaml(value: Any) -> None:
    assert parse_yaml(json.dumps(value, ensure_ascii=False), "x") == value
