"""llms.txt of the documentation site: each page once, with its first sentence."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from tests.support.paths import ROOT, files_of_repository

CONF = ROOT / "docs/conf.py"
ENTRY = re.compile(r"- \[([^]]+)\]\(_sources/([\w/-]+)\.md\.txt\)(?:: (.+))?")


@pytest.fixture(scope="module")
def conf() -> dict[str, Any]:
    """The names of conf.py, without its statements that copy files."""
    tree = ast.parse(CONF.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    names: dict[str, Any] = {"__file__": str(CONF)}
    exec(compile(tree, str(CONF), "exec"), names)
    return names


def test_every_page_is_listed_once_with_its_first_sentence(conf: dict[str, Any]) -> None:
    docs = ROOT / "docs"
    paths = files_of_repository("docs/*.md")
    pages = {str(path.relative_to(docs).with_suffix("")): path.read_text(encoding="utf-8") for path in paths}
    text = conf["llms_txt"](pages, conf["first_sentence"](pages["index"]))
    head, *sections = re.split(r"^## .+\n\n", text, flags=re.MULTILINE)
    assert head.startswith("# vlmpipe\n\n> vlmpipe fine-tunes vision-language models as one pipeline")
    entries = [ENTRY.fullmatch(line) for section in sections for line in section.strip().splitlines()]
    assert all(entries) and sorted(entry[2] for entry in entries if entry) == sorted(pages)
    described = {entry[2]: entry[3] for entry in entries if entry}
    assert described["reference/exit-codes"] == "What each exit code means and what to do."
    assert sum(map(bool, described.values())) > 0.9 * len(described)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("# T\n\nSays [this](x.md) of `a` **b**. And more.\n", "Says this of a b."),
        ("# T\n\nWrapped\nline, version 1.2 of it: Then a list", "Wrapped line, version 1.2 of it"),
        ("# T\n\n## Section\n\nText.", ""),
        ("# T\n\n| a | b |\n", ""),
    ],
)
def test_a_first_sentence_is_plain_text(conf: dict[str, Any], page: str, sentence: str) -> None:
    assert conf["first_sentence"](page) == sentence
