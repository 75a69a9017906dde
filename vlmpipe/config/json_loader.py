"""Reads JSON texts of people, such as a console's parameters, as strictly as their YAML files are read."""

from __future__ import annotations

import json
from typing import NoReturn

from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.trainer.nesting import is_nested_too_deep


def parse_json(text: str, source: str) -> object:
    """The value of a JSON text. Raises RunFileError, as `parse_yaml` does: for a key that is given twice, NaN, a number
    of more digits than Python reads, half a character, and for deep nesting."""

    def refuse(problem: str, where: str = "") -> NoReturn:
        raise RunFileError(source, [Problem(where, problem)])

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content: dict[str, object] = {}
        for key, value in pairs:
            if key in content:
                refuse("the key is given twice in one object", key)
            content[key] = value
        return content

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=lambda name: refuse(f"{name} is not JSON"))
        if is_nested_too_deep(value, text):
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RunFileError(source, [Problem(where, f"not JSON: {error.msg}")]) from error
    except UnicodeEncodeError as error:
        raise RunFileError(source, [Problem("", "holds half a character, which is no text")]) from error
    except ValueError as error:
        raise RunFileError(source, [Problem("", "holds a number of more digits than are read")]) from error
    except RecursionError as error:
        raise RunFileError(source, [Problem("", "nested too deep to be a run file")]) from error
    return value
