from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import fields_of
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.importer import import_run_file
from vlmpipe.importing.settings import words
from vlmpipe.importing.settings.words import load_words, table_of
from vlmpipe.importing.sources import source_of

TABLES = load_words()["tables"]
FIELDS = {path for path, _, _ in fields_of(RunConfig)}
ENTRIES = [(table, key, entry) for table, entries in TABLES.items() for key, entry in entries.items()]


def test_no_key_stands_twice_in_a_table() -> None:
    assert (
        parse_yaml(Path(words.__file__).with_name("words.yaml").read_text(), "words.yaml")["tables"].keys()
        == TABLES.keys()
    )


def test_every_entry_has_one_answer_and_its_field_exists() -> None:
    for table, key, entry in ENTRIES:
        if isinstance(entry, str):
            assert entry in FIELDS, (table, key)
        else:
            assert len(entry) == 1, (table, key)
            assert entry.keys() <= {"is", "drop", "refuse"}, (table, key)


def test_every_concept_is_translated() -> None:
    room = Path(words.__file__).parents[1]
    code = "".join(path.read_text() for path in sorted(room.rglob("*.py")) if path.name != "words.py")
    concepts = {entry["is"] for _, _, entry in ENTRIES if isinstance(entry, dict) and "is" in entry}
    assert {concept for concept in concepts if f'"{concept}"' not in code} == set()


def test_fields_that_reasons_name_exist() -> None:
    sections = "|".join(["train", "model", "data", "cluster", "gcp", "output", "checkpoint", "evaluate", "features"])
    for table, key, entry in ENTRIES:
        reason = "" if isinstance(entry, str) else entry.get("drop") or entry.get("refuse") or ""
        for field in re.findall(rf"\b(?:{sections})\.[a-z0-9_]+(?:\.[a-z_]+)*", reason):
            assert field.removesuffix(".split") in FIELDS or field in FIELDS, (table, key, field)


def test_every_argument_of_transformers_trainer_is_known() -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    (arguments,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    names = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert len(names) > 90
    assert names - table_of("transformers").keys() - {"framework"} <= {name for name in names if name.startswith("_")}


def test_data_that_cannot_be_read_leave_an_example() -> None:
    content = {"data_path": "http://user:secretpassword1@host/x", "learning_rate": 1e-4, "num_train_epochs": 1}
    imported = import_run_file(source_of(json.dumps(content), "f.json"))
    (found,) = [each for each in imported.findings if each.path == "data_path"]
    assert found.outcome == "refused" and "secretpassword1" not in imported.text
    assert "source: gs://example-bucket/conversations/train.json" in imported.text
