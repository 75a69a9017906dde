"""Every remedy that a module can print, from its source: what stands in the place of a fix, as templates.

A template has {...} where the program puts in a value; {remedies.f} is a command of vlmpipe.doctor.remedies.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where a call takes a fix: the position of the argument, beside the name fix. A warning's whole text may hold a remedy.
EVERYWHERE = {
    "Finding": 2, "UserError": 2, "ConfigError": 2, "append": 0, "print_warning": 0, "meant": 1, "_read_for": 2
}  # fmt: skip
OF_DOCTOR = {"missing": 2, "unseen": 2, "CannotSee": 1, "UnknownGpu": 1, "_unless_conditional": 3}


def remedies_of(path: Path) -> set[str]:
    """The templates of one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    positions = EVERYWHERE | (OF_DOCTOR if path.parent.name == "doctor" else {})
    constants = ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], [])
    found = set[str]()
    for function in functions.values():
        texts = _Texts(function, constants, functions)
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and (fix := _fix(call, positions)) is not None:
                found |= set(texts.of(fix))
    return {text for text in found if text.strip("{}")}


def _fix(call: ast.Call, positions: dict[str, int]) -> ast.expr | None:
    name = _name(call.func)
    if name not in positions or (name == "append" and "warnings" not in ast.unparse(call.func)):
        return None
    named = {one.arg: one.value for one in call.keywords}
    return named.get("fix") or dict(enumerate(call.args)).get(positions[name])


@dataclass(frozen=True)
class _Texts:
    function: ast.FunctionDef
    constants: ast.Module
    functions: dict[str, ast.FunctionDef]

    def of(self, node: ast.expr) -> Iterator[str]:
        """What an expression may be. Nothing for a fix that is handed on: it is found where it is made."""
        match node:
            case ast.Constant(value=str()):
                yield str(node.value)
            case ast.JoinedStr():
                yield from map("".join, itertools.product(*map(self._pieces, node.values)))
            case ast.BinOp(op=ast.Add()):
                yield from map("".join, itertools.product([*self.of(node.left)], [*self.of(node.right)]))
            case ast.IfExp():
                yield from [*self.of(node.body), *self.of(node.orelse)]
            case ast.BoolOp():
                yield from [text for one in node.values for text in self.of(one)]
            case ast.Name():
                here = [*_assigned(node.id, self.function)] or [*_assigned(node.id, self.constants)]
                yield from [text for value in here for text in self.of(value)]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="remedies"))):
                yield f"{{{ast.unparse(node.func)}}}"
            case ast.Call(func=ast.Name()) if called := self.functions.get(_name(node.func)):
                inside = _Texts(called, self.constants, self.functions)
                for statement in ast.walk(called):
                    if isinstance(statement, ast.Return) and statement.value:
                        yield from inside.of(statement.value)
            case ast.Call(func=ast.Attribute(attr="join"), args=[ast.GeneratorExp() | ast.ListComp() as many]):
                yield from self.of(many.elt)

    def _pieces(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.FormattedValue):
            return [*self.of(node.value)] or [f"{{{ast.unparse(node.value)}}}"]
        return [*self.of(node)]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """What a name may stand for, also as one of several names."""
    for statement in ast.walk(scope):
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=True))
            yield from (value for one, value in pairs if _name(one) == name)
