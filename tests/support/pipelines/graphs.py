"""Tasks and steps of a compiled pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]


def all_tasks(spec: Spec) -> Iterator[tuple[str, Spec, Spec]]:
    """(path of the task in the graph, the task, its component), groups such as conditions too."""

    def walk(dag: Spec, above: str) -> Iterator[tuple[str, Spec, Spec]]:
        for name, task in dag["tasks"].items():
            component = spec["components"][task["componentRef"]["name"]]
            yield f"{above}/{name}", task, component
            if "dag" in component:
                yield from walk(component["dag"], f"{above}/{name}")

    yield from walk(spec["root"]["dag"], "")


def steps(spec: Spec) -> dict[str, Spec]:
    """Tasks that run something, by name."""
    return {path.rpartition("/")[2]: task for path, task, component in all_tasks(spec) if "executorLabel" in component}


def shape(spec: Spec) -> dict[str, Any]:
    """What must not depend on the target: each task's place, dependencies, and where its inputs come from.

    Without the platform's name, which our own job steps take and Google's component does not.
    """

    def source(given: Spec) -> Any:
        return "constant" if "runtimeValue" in given else given

    def names(definitions: Spec) -> dict[str, list[str]]:
        return {
            kind: sorted(
                f"{name}: {content.get('parameterType') or content['artifactType']['schemaTitle']}"
                for name, content in group.items()
                if not ("worker_pool_specs" in group and name == "target")
            )
            for kind, group in definitions.items()
        }

    def inputs(task: Spec) -> dict[str, Any]:
        given = task.get("inputs", {}).get("parameters", {})
        without = {"target"} if "worker_pool_specs" in given else set()
        return {name: source(value) for name, value in given.items() if name not in without}

    return {
        path: {
            "after": task.get("dependentTasks", []),
            "inputs": inputs(task),
            "condition": task.get("triggerPolicy"),
            "input names": names(component.get("inputDefinitions", {})),
            "output names": names(component.get("outputDefinitions", {})),
        }
        for path, task, component in all_tasks(spec)
    }
