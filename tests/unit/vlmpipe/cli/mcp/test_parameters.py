"""Tools have the parameters of the command line, but for answers of a person, and their calls are command lines."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from tests.support.commands import parse_vlmpipe
from vlmpipe.cli.app import app
from vlmpipe.cli.mcp.parameters import WITHHELD, commands, input_schema, parameters_of, words_of
from vlmpipe.trainer.errors import ConfigError

COMMANDS: dict[str, Any] = dict(commands(typer.Context(typer.main.get_command(app), info_name="vlmpipe")))
SAMPLES: dict[str, Any] = {"string": "text", "boolean": True, "integer": 3, "number": 0.5}


def sample(schema: dict[str, Any]) -> Any:
    """A value that the schema takes."""
    if schema["type"] == "array":
        return [sample(schema["items"])]
    value = schema["enum"][0] if "enum" in schema else SAMPLES[schema["type"]]
    return type(value)(max(value, schema["minimum"])) if "minimum" in schema else value


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_with_every_parameter_is_a_command_line_that_is_parsed(name: str) -> None:
    parameters, always = parameters_of(COMMANDS[name])
    schema: Any = input_schema(parameters)
    given = {key: sample(value) for key, value in schema["properties"].items()}
    if "target" in given:
        given["target"] = "vertex"
    words = words_of(parameters, given)
    context = COMMANDS[name].make_context(name, [*always, *words.line()])
    shown = {key: list(map(str, value)) if isinstance(value, list | tuple) else value
             for key, value in context.params.items() if key in given}  # fmt: skip
    assert {key: str(value) for key, value in shown.items()} == {key: str(value) for key, value in given.items()}
    assert parse_vlmpipe([*name.split(), *always, *words.line()]) is not None


def test_no_call_answers_for_a_person_or_waits_for_the_end_of_a_run() -> None:
    offered = {parameter.name for command in COMMANDS.values() for parameter in parameters_of(command)[0]}
    assert offered & WITHHELD == set()
    assert {"yes", "force"} <= WITHHELD
    assert parameters_of(COMMANDS["submit"])[1] == ["--detach", "--json"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": "a.yaml", "yes": True}, "no parameter 'yes'"),
        ({"config": "a.yaml", "--force": True}, "no parameter '--force'"),
        ({}, "config is missing"),
        ({"config": 3}, "config is 3"),
        ({"config": ["a.yaml"]}, "config is"),
        ({"config": "--plain"}, "config is '--plain'"),
        ({"config": "a.yaml", "overrides": ["--plain"]}, "overrides is '--plain'"),
        ({"config": "a.yaml", "fresh": "true"}, "fresh is 'true'"),
        ({"config": "a.yaml", "retries": True}, "retries is True"),
        ({"config": "a\0.yaml"}, "config is"),
    ],
)
def test_what_is_no_call_of_the_tool_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        words_of(parameters_of(COMMANDS["run"])[0], given)


def test_texts_that_may_name_places_are_listed() -> None:
    parameters, _ = parameters_of(COMMANDS["compare"])
    words = words_of(parameters, {"runs": ["one", "/two"], "html": "report.html"})
    assert words.texts == (("runs", "one"), ("runs", "/two"), ("html", "report.html"))
    assert words.line() == ["--html=report.html", "--", "one", "/two"]
