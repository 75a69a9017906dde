"""`run:RUN_ID` in a run file's model section: the export of an earlier run."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpipe.config.sections.output import OutputConfig
from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.trainer.config.job import RUN_ID, run_uri_of
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket, join_uri
from vlmpipe.trainer.storage.export_manifest import FOLDER, MARKER

PREFIX = "run:"
ADAPTER = "model.lora.pretrained"
SETTINGS = "adapter_config.json"  # PEFT's


def with_exports(data: Mapping[str, object], source: str) -> dict[str, object]:
    """The run file's content with the address of an export in place of each run. Raises RunFileError for unknown runs.

    A run is looked for in output.root_uri, and then in gcp.pipeline_root. Whether a run in a bucket is there,
    `vlmpipe doctor` and the first step of a pipeline say.
    """
    content = copy.deepcopy(dict(data))
    model = _section(content, "model")
    fields = {f"model.{name}.weights": (_section(model, name), "weights") for name in ("pretrained", *PARTS)}
    fields |= {"model.tokenizer": (model, "tokenizer"), ADAPTER: (_section(model, "lora"), "pretrained")}
    problems = []
    for path, (section, name) in fields.items():
        value = section.get(name)
        if isinstance(value, str) and value.startswith(PREFIX):
            section[name], problem = _export(content, value.removeprefix(PREFIX))
            if not problem and path != "model.tokenizer":
                problem = _other_kind(section[name], path)
            problems += [Problem(path, f"found {value}, {problem}")] if problem else []
    if problems:
        raise RunFileError(source, problems)
    return content


def _section(content: dict[str, object], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _other_kind(export: str, path: str) -> str:
    """Problem of an export on this machine that is an adapter in place of a model, or the reverse."""
    if in_bucket(export) or Path(export, SETTINGS).is_file() == (path == ADAPTER):
        return ""
    if path == ADAPTER:
        return "but that run exported a whole model; expected one with model.lora.export adapter"
    return f"but that run exported an adapter; expected a whole model, and the adapter in {ADAPTER}"


def _export(content: dict[str, object], run_id: str) -> tuple[str, str]:
    """The address of a run's export, and the problem with that export."""
    if not RUN_ID.fullmatch(run_id):
        why = ": @last would be another run as soon as one starts" if run_id.startswith("@") else ""
        return (
            "",
            f"expected run:RUN_ID with the whole id of a run, which a run file keeps{why}; vlmpipe runs lists ids",
        )
    root = str(_section(content, "output").get("root_uri") or OutputConfig().root_uri)
    pipeline_root = str(_section(content, "gcp").get("pipeline_root") or "")
    if in_bucket(root):
        return join_uri(run_uri_of(root, run_id, ""), FOLDER), ""
    root = open_storage(root).root_uri  # absolute: a job may run in another folder
    export = join_uri(run_uri_of(root, run_id, ""), FOLDER)
    if Path(export, MARKER).is_file():
        return export, ""
    if pipeline_root.startswith("gs://"):
        return join_uri(run_uri_of(pipeline_root, run_id, ""), FOLDER), ""
    if Path(export).parent.is_dir():
        return "", f"but that run has no export in {export}; expected a run that was trained to its end"
    runs = Path(export).parent.parent
    close = difflib.get_close_matches(run_id, [path.name for path in runs.glob("*")], 1)
    hint = f": did you mean run:{close[0]}?" if close else ""
    return "", f"but there is no such run in {runs}; expected the id of a run{hint}"
