"""Machines that cost money are started by functions that take an approval, and one function gives approvals."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("vlmpipe", "pipelines", "components")
# Requests that start, enlarge or extend what is paid for: names of services' methods, and of our function around one.
SPENDING = {
    "create_pipeline_job", "create_custom_job", "create_hyperparameter_tuning_job", "create_schedule",
    "update_schedule", "resume_schedule", "create_endpoint", "deploy_model", "run_pipeline", "create_recurring_run",
    "enable_recurring_run", "create_namespaced_custom_object", "create_job", "create_service", "update_service",
}  # fmt: skip
# Requests of the same verbs that start no machine.
FREE = {
    "create_experiment", "create_pipeline", "update_endpoint", "create_branch", "create_repo", "create_commit",
}  # fmt: skip
# Functions of a run's steps: the run was approved with them. `file: function`, and what they are part of.
OF_A_RUN = {
    "vlmpipe/platforms/vertex/jobs/custom_job.py: create_job": "job steps, and `JobSubmission.send`, which is approved",
    "vlmpipe/platforms/vertex/jobs/capacity_fallback.py: _started": "job steps",
    "vlmpipe/platforms/vertex/endpoint.py: _create": "deploy-model",
    "vlmpipe/platforms/vertex/endpoint.py: _send": "deploy-model",
    "vlmpipe/platforms/vertex/cloud_run/service.py: _deployed": "deploy-model",
    "vlmpipe/platforms/vertex/cloud_run/service.py: _update": "deploy-model",
    "vlmpipe/platforms/kubeflow/jobs/client.py: create": "job steps",
    "vlmpipe/platforms/kubeflow/inference_service.py: _send": "deploy-model",
}
VERB = re.compile(r"(create|resume|update|deploy|enable|start|run|submit|retry|mutate)_[a-z_]+")
CLIENT = re.compile(r"(^|\.)_?(client|api|custom)$")
# What one of these tests looks for stands in the text of a module that may be found: others are not parsed.
MAY_SPEND = re.compile(rf"\b(_?client|_?api|_?custom|Approved|require_approval|{'|'.join(sorted(SPENDING))})\b")


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).resolve().rglob("*.py"))]
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return [
        (name, ast.parse(text))
        for name, path in names.items()
        if not name.startswith(("vlmpipe/rehearsal", "vlmpipe/trainer"))
        and MAY_SPEND.search(text := path.read_text(encoding="utf-8"))
    ]


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, list[ast.AST]]]:
    """Functions of modules and classes, each with all that it contains."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, list(ast.walk(node))
        else:
            yield from functions(node)


def takes_an_approval(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return any(argument.annotation and ast.unparse(argument.annotation) == "Approved" for argument in arguments)


def names(nodes: list[ast.AST]) -> set[str]:
    """Attributes, and names that are called."""
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return called | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def unapproved(path: str, tree: ast.Module) -> set[str]:
    return {
        f"{path}: {function.name}"
        for function, nodes in functions(tree)
        if names(nodes) & SPENDING and not takes_an_approval(function)
    }


def test_what_is_paid_for_is_started_by_a_function_that_takes_an_approval() -> None:
    found = set[str]().union(*(unapproved(*source) for source in sources()))
    assert found == OF_A_RUN.keys()


def test_a_new_request_to_a_service_is_one_that_spends_or_one_that_does_not() -> None:
    found = {
        node.attr
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and VERB.fullmatch(node.attr) and CLIENT.search(ast.unparse(node.value))
    }
    assert found - SPENDING == FREE


def test_approvals_are_made_by_one_function_which_no_caller_answers() -> None:
    makers, answered = set[str](), set[str]()
    for path, tree in sources():
        for function, nodes in functions(tree):
            calls = {
                node.func.id: node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            makers |= {f"{path}: {function.name}"} if "Approved" in calls else set()
            if call := calls.get("require_approval"):
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                answered |= {path} if isinstance(keywords["yes"], ast.Constant) else set()
                never_sent = isinstance(keywords["dry_run"], ast.Constant) and keywords["dry_run"].value
                answered |= {path} if never_sent else set()
    assert makers == {"vlmpipe/planner/spending/approval.py: require_approval"}
    assert answered == set()


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("def f(client):\n    client.create_schedule()", True),
        ("class A:\n    def f(self):\n        send(self._client.resume_schedule)", True),
        ("def f(client, approved: Approved):\n    client.create_schedule()", False),
        ("def f(client):\n    client.list_schedules()", False),
    ],
)
def test_a_function_without_an_approval_is_found(code: str, is_found: bool) -> None:
    assert unapproved(str(Path("x.py")), ast.parse(code)) == ({"x.py: f"} if is_found else set())
