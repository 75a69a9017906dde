"""Values of a run in its compiled pipeline, which services return as nested objects."""

from __future__ import annotations

import json

from vlmpipe.trainer.nesting import object_at

_ROOT_URI = ("root", "dag", "tasks", "notify", "inputs", "parameters", "root_uri", "runtimeValue")


def compiled_run_file(spec: object) -> dict[str, object]:
    """Return the run file with which the pipeline was compiled; empty for a pipeline that is not vlmpipe's."""
    default = object_at(spec, "root", "inputDefinitions", "parameters", "run_file").get("defaultValue")
    return run_file_of_text(str(default or ""))


def run_file_of_text(text: str) -> dict[str, object]:
    """Return the run file that a parameter holds as JSON; empty for none."""
    content = json.loads(text or "{}")
    return content if isinstance(content, dict) else {}


def compiled_root_uri(spec: object) -> str:
    """Return the folder of all runs; empty for a pipeline that is not vlmpipe's."""
    return str(object_at(spec, *_ROOT_URI).get("constant", ""))


def names_of_stages(run_file: dict[str, object]) -> list[str]:
    """Return the names of the run file's stages; one empty name without stages."""
    stages = run_file.get("stages")
    names = [str(stage["name"]) for stage in stages] if isinstance(stages, list) else []
    return names or [""]
