"""One table makes the pipeline's parameters: those that the console shows and those that resolve-run takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import attrgetter

import docstring_parser
import pytest

from tests.support.paths import ROOT
from vlmpipe.components.resolve_run import resolve_run
from vlmpipe.components.runtime.parameters import (
    PARAMETERS,
    PipelineParameter,
    console_docstring,
    console_signature,
)
from vlmpipe.config.run_config import RunConfig, load_run_file

OF_THE_GRAPH = ("compiled", "job_name")  # inputs of resolve-run that no person sets


@pytest.fixture(scope="module")
def config() -> Iterator[RunConfig]:
    yield load_run_file(ROOT / "configs/digits.yaml")


def test_resolve_run_takes_every_parameter_of_the_table() -> None:
    inputs = inspect.signature(resolve_run).parameters.values()
    literal = [(value.name, value.annotation) for value in inputs if value.name not in OF_THE_GRAPH]
    assert literal == [(parameter.name, parameter.type) for parameter in PARAMETERS]


@pytest.mark.parametrize("parameter", [value for value in PARAMETERS if value.field], ids=lambda value: value.name)
def test_a_parameter_has_the_type_and_the_value_of_its_field(parameter: PipelineParameter, config: RunConfig) -> None:
    value = attrgetter(parameter.field)(config)
    assert type(value) is parameter.type
    shown = console_signature(config).parameters[parameter.name]
    assert (shown.annotation, shown.default) == (parameter.type, value)


def test_the_docstring_describes_every_parameter_once(config: RunConfig) -> None:
    parsed = docstring_parser.parse(console_docstring(config, "Trains."))
    assert parsed.short_description == "Trains."
    assert [value.arg_name for value in parsed.params] == [parameter.name for parameter in PARAMETERS]
    for value, parameter in zip(parsed.params, PARAMETERS, strict=True):
        assert (value.description or "").startswith(parameter.description) and parameter.field in value.description
