"""A run-file field earns its place: a guide or a shipped run file names it, or its description says when to set it.

A name that is also a common word counts as named where a guide has that word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.support.paths import ROOT, files_of_repository

GUIDES = ("README.md", "configs", "examples", "recipes", "docs/how-to", "docs/tutorial*")
WHEN = re.compile(r"(?:^|[.;] )(?:Set|Raise|Lower|Turn) it\b")


def _described(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field that a person may leave out, with its description; sections are named by their fields."""
    definitions, waiting, seen = schema["$defs"], [("", schema)], set[str]()
    while waiting:
        path, node = waiting.pop()
        reference = node.get("$ref", "").rpartition("/")[2]
        if reference and (path + reference) not in seen:
            seen.add(path + reference)
            waiting.append((path, definitions[reference]))
        inner = [node["items"]] if isinstance(node.get("items"), dict) else []
        waiting += [(path, option) for key in ("anyOf", "oneOf", "allOf") for option in node.get(key, ())]
        waiting += [(path, option) for option in inner]
        for name, field in node.get("properties", {}).items():
            if path.count(".") < 6:  # stages have the sections of a run file again
                waiting.append((f"{path}{name}.", field))
            if name not in node.get("required", ()) and "$ref" not in json.dumps(field):
                yield f"{path}{name}", field.get("description", "")


def test_a_field_is_in_a_guide_or_its_description_says_when_to_set_it() -> None:
    files = [path for path in files_of_repository(*GUIDES) if path.suffix in (".md", ".yaml", ".py", ".ipynb")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    fields = dict(_described(json.loads((ROOT / "docs/reference/run-file.schema.json").read_text())))
    assert len(fields) > 300
    unused = [name for name, text in fields.items() if name.rpartition(".")[2] not in words and not WHEN.search(text)]
    assert unused == []
