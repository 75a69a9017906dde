"""Settings of training programs, such as TRL and LLaMA-Factory, by the table `words.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Literal, TypedDict

from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.importing.findings import Path
from vlmpipe.importing.settings.concepts import Concepts, Defaults, is_on
from vlmpipe.importing.translation import Translation

Tool = Literal["transformers", "trl", "llama_factory", "axolotl", "accelerate"]
# Concepts whose values may be mappings.
_NESTED = ("deepspeed", "fsdp_options", "schedule_arguments", "datasets")

# An answer that is no field's name: one of these keys, with its text.
Answer = TypedDict("Answer", {"is": str, "drop": str, "refuse": str}, total=False)
Table = Mapping[str, str | Answer]


class Program(TypedDict):
    """A training program: the tables of its keys in order of precedence, and its defaults by concept."""

    name: str
    version: str
    tables: list[str]
    defaults: Defaults


class Words(TypedDict):
    """The content of `words.yaml`."""

    tools: dict[str, Program]
    tables: dict[str, dict[str, str | Answer]]


@functools.cache
def load_words() -> Words:
    words: Words = packaged_yaml(FilePath(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
    return words


@functools.cache
def table_of(tool: Tool) -> Table:
    """Keys of a program with their answers."""
    table: dict[str, str | Answer] = {}
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


def unknown(key: str, known: Iterable[str], program: str) -> str:
    """The reason for a key that no table has."""
    return f"{program} has no such key that is known here{did_you_mean(key, list(known))}"


def _known_key(key: Path, table: Table) -> str:
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


def _answer(concepts: Concepts, entry: str | Answer, section: Path, leaf: Path) -> None:
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
