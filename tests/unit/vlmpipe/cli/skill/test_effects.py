"""The table of effects is held to the code: who asks for approval, who reads, and what is printed for programs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.command_line import Vlmpipe
from tests.support.compared_runs import make
from vlmpipe.cli.app import app
from vlmpipe.cli.skill.command_tree import Command, commands_of
from vlmpipe.cli.skill.effects import Effect, load_effects
from vlmpipe.trainer.evaluation.prediction.predict import Predictor

DIGITS = "configs/digits.yaml"
CONFIRM = "terminal_confirm"
COMMANDS = list(commands_of(typer.Context(typer.main.get_command(app), info_name="vlmpipe")))


def with_effect(*effects: Effect) -> set[str]:
    return {name for name, entry in load_effects().items() if entry.effect in effects}


def callbacks(group: Any = None, prefix: str = "") -> dict[str, Any]:
    """The function behind each command, by its words."""
    result = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            result |= callbacks(command, f"{prefix}{name} ")
        else:
            result[f"{prefix}{name}"] = inspect.unwrap(command.callback)
    return result


def reached_functions(callback: Any) -> list[ast.FunctionDef]:
    """The callback and what it calls of the command line's modules, as they are written."""
    places, reached = [(callback.__module__, callback.__name__)], dict[tuple[str, str], ast.FunctionDef]()
    while places:
        module, name = places.pop()
        functions, imported = functions_of(module)
        if name in functions and (module, name) not in reached:
            reached[module, name] = functions[name]
            names = [node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)]
            places += [(imported.get(name, module), name) for name in names]
    return list(reached.values())


@functools.cache
def functions_of(module: str) -> tuple[dict[str, ast.FunctionDef], dict[str, str]]:
    """A module's functions by name, and the modules of the command line from which it imports others."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return functions, {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if str(node.module).startswith("vlmpipe.cli.")
    }


def asks(function: ast.FunctionDef) -> str:
    """How a function uses the question in the terminal: not at all, for a price (it hands it on), or by itself."""
    nodes = list(ast.walk(function))
    if not any(isinstance(node, ast.Name) and node.id == CONFIRM for node in nodes):
        return ""
    keywords = {keyword.arg for node in nodes if isinstance(node, ast.Call) for keyword in node.keywords}
    return "price" if "ask" in keywords else "other"


def test_the_table_has_every_command() -> None:
    assert {command.name for command in COMMANDS} == load_effects().keys()


BY_CAPS = {"mcp"}  # approves by its own options, and the commands that it starts ask its caps


def test_spending_commands_are_those_that_ask_for_approval_of_a_price() -> None:
    found = {name: {asks(function) for function in reached_functions(each)} for name, each in callbacks().items()}
    assert {name for name, uses in found.items() if "price" in uses} == with_effect(Effect.spends) - BY_CAPS
    assert {name for name, uses in found.items() if "other" in uses} == with_effect(Effect.removes)


def test_an_approval_in_a_function_that_is_called_is_found() -> None:
    tree = ast.parse("def f():\n    submit(ask=terminal_confirm())\ndef g():\n    ask = terminal_confirm()\ndef h(): 1")
    assert [asks(function) for function in tree.body if isinstance(function, ast.FunctionDef)] == ["price", "other", ""]


def test_commands_with_yes_are_those_that_ask() -> None:
    def has(command: Command, option: str) -> bool:
        return any(typed.split()[0] == option for typed, _ in command.options)

    assert {one.name for one in COMMANDS if has(one, "--yes")} == with_effect(Effect.spends, Effect.removes) - BY_CAPS
    assert {one.name for one in COMMANDS if has(one, "--force")} <= with_effect(Effect.spends)
    assert {one.name for one in COMMANDS if has(one, "--json")} >= {
        n for n, entry in load_effects().items() if entry.json
    }


def tree_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("fake_pipeline")
def test_documents_have_the_fields_and_reading_changes_no_run(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    answers = {"run": vlmpipe("run", DIGITS, f"output.root_uri={root}", "--run-id", "mine", "--json")}
    for name in ("one", "two"):
        make(root, name, [(str(n), "two", "two") for n in range(4)])
    before, here = tree_of(tmp_path), ("--root", str(root), "--json")
    answers |= {
        "status": vlmpipe("status", "mine", *here),
        "diagnose": vlmpipe("diagnose", "mine", *here),
        "compare": vlmpipe("compare", "one", "two", *here),
        "runs list": vlmpipe("runs", "list", *here),
        "check": vlmpipe("check", DIGITS, f"output.root_uri={root}", "--json"),
        "plan": vlmpipe("plan", DIGITS, f"output.root_uri={root}", "--target", "local", "--json"),
    }
    logs = vlmpipe("logs", "mine", "--last", "1", *here)
    assert tree_of(tmp_path) == before
    assert {name for name in answers if load_effects()[name].effect == Effect.reads} == answers.keys() - {"run"}
    answers |= {"logs": logs, "skill": vlmpipe("skill", "--output", str(tmp_path), "--json")}
    for name, answer in answers.items():
        assert answer.code == 0, (name, answer.err)
        assert set(load_effects()[name].json) <= answer.json.keys(), name
    assert answers.keys() | {"submit", "ask", "predict"} == {
        name for name, entry in load_effects().items() if entry.json
    }


def test_answers_of_a_model_are_in_the_documents_field(
    vlmpipe: Vlmpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def answer(self, *_: object, **__: object) -> list[object]:
            return [[]]

    monkeypatch.setattr(Predictor, "load", lambda _job: Silent())
    make(tmp_path, "one", [("a", "two", "two")])
    (tmp_path / "a.png").write_bytes(b"image")
    for command in (
        ("ask", "one", str(tmp_path / "a.png"), "what?"),
        ("predict", "one", str(tmp_path / "a.png"), "--question", "what?"),
    ):
        answer = vlmpipe(*command, "--root", str(tmp_path), "--json")
        assert answer.code == 0, answer.err
        assert answer.json.keys() == set(load_effects()[command[0]].json)
