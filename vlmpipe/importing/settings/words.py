"""Settings of training programs, such as TRL and LLaMA-Factory, by the table `words.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Literal

from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.importing.findings import Path
from vlmpipe.importing.settings.concepts import Concepts, is_on
from vlmpipe.importing.translation import Translation

Tool = Literal["transformers", "trl", "llama_factory", "axolotl", "accelerate"]
# Concepts whose values may be mappings.
_NESTED = ("deepspeed", "fsdp_options", "schedule_arguments", "datasets")


@functools.cache
def load_words() -> Mapping[str, Any]:
    words: Mapping[str, Any] = packaged_yaml(FilePath(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
    return words


@functools.cache
def table_of(tool: Tool) -> Mapping[str, Any]:
    """Keys of a program with their answers."""
    table: dict[str, Any] = {}
    for name in reversed(load_words()["tools"][tool]["tables"]):
        table |= load_words()["tables"][name]
    return table


def translate_words(translation: Translation, tool: Tool, *, under: Path = ()) -> Concepts:
    """Answer the keys below `under` that the table has, and gather its concepts, which are not yet translated."""
    description, table = load_words()["tools"][tool], table_of(tool)
    concepts = Concepts(translation, description["version"], description["defaults"])
    for leaf in translation.ledger.below(under):
        key = leaf[len(under) :]
        if key and translation.value(leaf) is None:
            translation.drop(leaf, "not set there")
        elif name := _known_key(key, table):
            _answer(concepts, table[name], leaf[: len(under) + len(name.split("."))], leaf)
        elif key:
            translation.refuse(leaf, unknown(str(key[0]), table, description["name"]))
    return concepts


def unknown(key: str, known: Mapping[str, Any], program: str) -> str:
    """The reason for a key that no table has."""
    return f"{program} has no such key that is known here{did_you_mean(key, list(known))}"


def _known_key(key: Path, table: Mapping[str, Any]) -> str:
    """The table's key of a value: its own, that of a section around it, or a beginning such as `swanlab_*`."""
    texts = [".".join(str(part) for part in key[:length]) for length in range(len(key), 0, -1)]
    for text in texts:
        entry = table.get(text) or table.get(text.replace("-", "_"))
        is_whole = text == texts[0] or isinstance(entry, Mapping)
        if entry and is_whole:
            nests = not isinstance(entry, Mapping) or "is" not in entry or entry["is"] in _NESTED
            if text == texts[0] or nests:
                return text if text in table else text.replace("-", "_")
    return next((name for name in table if name.endswith("*") and texts[-1].startswith(name[:-1])), "")


def _answer(concepts: Concepts, entry: Any, section: Path, leaf: Path) -> None:
    translation, value = concepts.translation, concepts.translation.value(leaf)
    if isinstance(entry, str):
        translation.express(leaf, entry, value)
    elif concept := entry.get("is"):
        if section == leaf:
            concepts.add(concept, leaf, value)
        elif concept not in concepts.entries:
            concepts.add(concept, section, {})
    elif reason := entry.get("drop"):
        translation.drop(leaf, reason)
    elif not is_on(value):
        translation.drop(leaf, "off, as here")
    else:
        translation.refuse(leaf, entry["refuse"])
