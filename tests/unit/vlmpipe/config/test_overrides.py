"""Overrides of a run file: one merge for command line, parameters, stages and variants."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.support.paths import ROOT
from tests.support.pipelines.run_files import SMALL
from vlmpipe.config.overrides import (
    KEYED,
    apply_overrides,
    leaves,
    merged,
    override_texts,
    parse_overrides,
    read_overrides,
    twice,
)
from vlmpipe.config.run_config import RunConfig, load_run_file, parse_run_config
from vlmpipe.config.sections.stages import StageConfig
from vlmpipe.config.validation_errors import ProblemsError, RunFileError
from vlmpipe.runs.setting_differences import differences
from vlmpipe.trainer.errors import UserError

DIGITS = ROOT / "configs/digits.yaml"
BASE: dict[str, Any] = {
    "gate": {"min_exact_match": 0.75, "max_loss": None, "per_slice": {"a": 0.5, "b": 0.6}},
    "train": {"epochs": 5, "optimizer": {"learning_rate": 0.1, "betas": [0.9, 0.95]}},
    "stages": [{"name": "one", "gate": {}, "train": {"epochs": 1}}, {"name": "two", "gate": {"max_loss": 2.0}}],
}


def keyed_fields(model: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the fields that are mappings with keys of the user's own."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            yield from keyed_fields(field.annotation, f"{path}.{field.alias or name}".lstrip("."))
    elif get_origin(model) is dict or model is dict:
        yield path
    else:
        for option in get_args(model):
            yield from keyed_fields(option, path)


def test_the_fields_with_keys_of_the_users_own_are_those_of_the_schema() -> None:
    inside_lists = (
        "data.phases.weights",
        "data.sources.arguments",
        *(f"stages.{name}" for name in StageConfig.model_fields),
    )
    assert sorted(set(keyed_fields(RunConfig)) - set(inside_lists)) == sorted(KEYED)


@pytest.mark.parametrize(
    "section", ["gate={max_loss: 3}", "gate.max_loss=3", "gate={max_loss: 3.0, }"], ids=["section", "field", "comma"]
)
def test_a_section_leaves_the_fields_that_it_does_not_name(section: str) -> None:
    before, after = load_run_file(DIGITS).gate, load_run_file(DIGITS, [section]).gate
    assert before.min_exact_match > 0 and before.min_margin_over_chance is not None
    assert after == before.model_copy(update={"max_loss": 3.0})


@pytest.mark.parametrize("path", ["gate", "train", "train.optimizer", "evaluate", "model", "data"])
def test_a_field_in_its_section_is_the_field_alone(path: str) -> None:
    """For every plain field of the section."""
    content = load_run_file(DIGITS).to_dict()
    section: Any = content
    for name in path.split("."):
        section = section[name]
    for name, value in section.items():
        if not isinstance(value, dict):
            assert apply_overrides(content, {path: {name: value}}) == content
            assert apply_overrides(content, {path: {name: "x"}}) == apply_overrides(content, {f"{path}.{name}": "x"})


def test_a_mapping_that_is_one_value_is_replaced_and_an_entry_of_it_can_be_set() -> None:
    assert apply_overrides(
        {"model": {"tower": {"config": {}, "revision": "x"}}}, {"model.tower": {"weights": "y"}}
    ) == {"model": {"tower": {"weights": "y"}}}
    assert apply_overrides(BASE, {"gate.per_slice": {"c": 1.0}})["gate"]["per_slice"] == {"c": 1.0}
    assert apply_overrides(BASE, {"gate": {"per_slice": {}}})["gate"]["per_slice"] == {}
    assert apply_overrides(BASE, {"gate.per_slice.b": 0.7})["gate"]["per_slice"] == {"a": 0.5, "b": 0.7}


def test_sections_of_a_list_are_found_by_name() -> None:
    for overrides in ({"stages.one.train.epochs": 3}, {"stages.one": {"train": {"epochs": 3}}}):
        changed = apply_overrides(BASE, overrides)
        assert differences({"stages": BASE["stages"][0]}, {"stages": changed["stages"][0]}) == {
            "stages.train.epochs": (1, 3)
        }
    with pytest.raises(RunFileError, match="there is no three in the list"):
        apply_overrides(BASE, {"stages.three.train.epochs": 3})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"train.epochs": 2, "train": {"epochs": 7}}, "train.epochs: is given twice"),
        ({"train": None, "train.epochs": 7}, "train.epochs: is given twice, as train too"),
        ({"gate.per_slice": {"a": 1.0}, "gate.per_slice.a": 0.1}, "gate.per_slice.a: is given twice"),
        ({"gate": {}}, "gate: found an empty section, which changes nothing"),
        ({"train": {"optimizer": {}}}, "train.optimizer: found an empty section"),
        ({"train.epochs": {"x": 1}}, "train.epochs.x: epochs is a single value"),
        ({"train.optimizer.betas.x": 1}, "betas is a list, and x is no section of it"),
    ],
)
def test_an_override_that_does_not_mean_one_thing_is_refused(overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(RunFileError, match=problem.replace(".", r"\.")):
        apply_overrides(BASE, overrides)


@pytest.mark.parametrize(("encoding", "way_out"), [("ascii", "set PYTHONUTF8=1"), ("utf-8", "")])
def test_text_that_did_not_arrive_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, encoding: str, way_out: str
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(RunFileError, match="expected text in UTF-8 without NUL") as refused:
        parse_overrides(["output.root_uri=l\udcc3\udca4ufe"])
    assert way_out in str(refused.value) and ("PYTHONUTF8" in str(refused.value)) == bool(way_out)


def test_overrides_in_a_list_are_named() -> None:
    """As Python code may give them to vlmpipe.load."""
    with pytest.raises(RunFileError, match=r"found \['train.epochs=2'\], expected a text .* an argument of its own"):
        parse_overrides([["train.epochs=2"]])


def test_an_empty_section_turns_one_on_that_is_null() -> None:
    assert apply_overrides({"deploy": None}, {"deploy": {}}) == {"deploy": {}}


def test_a_stage_is_merged_as_an_override_is() -> None:
    changes = {"gate": {"max_loss": 1.0}, "train": {"optimizer": {"learning_rate": 0.5}}}
    assert merged(BASE, changes) == apply_overrides(BASE, changes)
    with pytest.raises(ProblemsError, match="epochs is a single value"):
        merged(BASE, {"train": {"epochs": {"x": 1}}})
    staged = load_run_file(ROOT / "configs/digits-stages.yaml").to_dict()
    staged["stages"][0]["train"]["epochs"] = {"x": 1}
    with pytest.raises(RunFileError, match=r"stages\.align\.train\.epochs\.x: epochs is a single value"):
        parse_run_config(staged, "x")


PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join)


@given(st.lists(PATHS, max_size=6))
def test_twice_finds_a_pair_wherever_there_is_one(paths: list[str]) -> None:
    pairs = itertools.combinations(paths, 2)
    overlaps = [(a, b) for a, b in pairs if f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")]
    assert bool(twice(paths)) == bool(overlaps)


TREES = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1), max_leaves=6
)


@given(st.dictionaries(st.sampled_from("abc"), TREES), st.dictionaries(st.sampled_from("abc"), TREES))
def test_an_override_changes_the_fields_that_it_names_and_no_other(
    content: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        after = apply_overrides(content, changes)
    except RunFileError as error:
        assert "single value" in error.text()
        return
    named, was, now = dict(leaves(changes)), dict(leaves(content)), dict(leaves(after))
    assert {path: value for path, value in now.items() if path in named} == named
    below = tuple(f"{path}." for path in named)  # a value in a section's place
    kept = {path: value for path, value in was.items() if path not in named and not path.startswith(below)}
    assert {path: value for path, value in now.items() if path not in named} == kept


# --- texts ---

BAD_TEXTS = {
    "a key twice": '{"a": 1, "a": 2}',
    "a key twice inside": '{"a": {"b": 1, "b": 2}}',
    "too many digits": f'{{"a": {"9" * 5000}}}',
    "nested too deep": '{"a":' * 3000 + "1" + "}" * 3000,
    "nested too deep for us": '{"a":' * 101 + "1" + "}" * 101,
    "half a character": '{"a": "\\ud800"}',
    "not closed": '{"a": 1',
}


@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_console_and_a_command_line_refuse_the_same_texts(text: str) -> None:
    for read in (read_overrides, lambda value: parse_overrides([f"train={value}"])):
        with pytest.raises(UserError) as caught:
            read(text)
        assert caught.value.code == 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train.epochs=3", "parameter overrides: 1 problem\n  line 1, column 1: not JSON"),
        ("[1]", "expected a JSON object such as"),
        ("null", "found null, expected a JSON object"),
        ('{"train.": 3}', "found the key 'train.', expected section.field"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1, "a": 2}', "a: the key is given twice in one object"),
    ],
)
def test_a_text_that_is_no_override_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read_overrides(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "\n", "{}"])
def test_a_blank_text_overrides_nothing(text: str) -> None:
    assert read_overrides(text) == {}


@given(st.text(max_size=60))
def test_any_text_gives_overrides_or_an_error_message(text: str) -> None:
    try:
        apply_overrides(BASE, read_overrides(text))
    except UserError as error:
        assert error.code == 64


PRINTABLE = st.text(st.characters(blacklist_categories=("C", "Z")), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | PRINTABLE


@given(st.dictionaries(st.sampled_from(["a.b", "c"]), SCALARS | st.lists(SCALARS, max_size=3)))
@example({"cluster.reduction_server": None, "train.shard_frozen_weights": True, "gate.version": "1"})
def test_overrides_that_are_printed_are_read_as_they_were(change: dict[str, Any]) -> None:
    assert parse_overrides(shlex.split(shlex.join(override_texts(change)))) == change


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("train.epochs=true", "train.epochs"),
        ("train.optimizer.learning_rate=true", "train.optimizer.learning_rate"),
        ("train.optimizer.betas=[0.9, true]", "train.optimizer.betas.1"),
        ("gate.per_slice={a: true}", "gate.per_slice.a"),
    ],
)
def test_a_switch_is_no_number_and_its_place_is_named(override: str, place: str) -> None:
    with pytest.raises(RunFileError) as caught:
        load_run_file(DIGITS, [override])
    assert [(one.field, one.text) for one in caught.value.problems] == [(place, "found true, expected a number")]


def test_overrides_replace_fields_and_create_sections() -> None:
    overrides = parse_overrides(["train.epochs=3", "gate.per_slice={digit: 0.5}", "data.image_folder="])
    config = parse_run_config(apply_overrides(SMALL, overrides), "x")
    assert (config.train.epochs, config.gate.per_slice, config.data.image_folder) == (3, {"digit": 0.5}, "")
    assert "epochs" not in SMALL["train"]


@pytest.mark.parametrize("texts", [["train.epochs"], ["=1"], ["a..b=1"], ["a=1", "a=2"], ["a.b=[1"]])
def test_a_malformed_override_is_refused(texts: list[str]) -> None:
    with pytest.raises(RunFileError):
        parse_overrides(texts)


def test_an_override_through_a_plain_value_is_refused() -> None:
    with pytest.raises(RunFileError, match=r"train\.epochs\.x: epochs is a single value"):
        apply_overrides({"train": {"epochs": 1}}, {"train.epochs.x": 1})


@pytest.mark.parametrize("content", [load_run_file(DIGITS).to_dict(), load_run_file(DIGITS).given()])
def test_a_warmup_in_steps_takes_the_place_of_the_fraction_and_the_other_way_round(content: dict[str, Any]) -> None:
    def warmup(*changes: dict[str, Any]) -> tuple[float | None, int | None]:
        changed = content
        for change in changes:
            changed = apply_overrides(changed, change)
        train = parse_run_config(changed, "a test").train
        return train.warmup_fraction, train.warmup_steps

    assert warmup() == (0.03, None)
    assert warmup({"train.warmup_steps": 9}) == (None, 9)
    assert warmup({"train": {"warmup_steps": 9}}) == (None, 9)
    assert warmup({"train.warmup_steps": 9}, {"train.warmup_fraction": 0.1}) == (0.1, None)
    assert warmup({"train.warmup_steps": None}) == (0.03, None)
    with pytest.raises(RunFileError, match="both say how long the learning rate rises"):
        warmup({"train.warmup_steps": 9, "train.warmup_fraction": 0.1})


def test_a_stage_may_have_a_warmup_of_its_own_kind() -> None:
    stages = load_run_file(ROOT / "configs/llava-7b-stages.yaml", ["stages.align.train.warmup_steps=50"]).stage_runs()
    align, *others = (run.train for run in stages.values())
    assert (align.warmup_fraction, align.warmup_steps) == (None, 50)
    assert [(train.warmup_fraction, train.warmup_steps) for train in others] == [(0.03, None)] * len(others)
