"""Wording of the product: first words of docstrings and field descriptions, and words that plain English replaces."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.support.paths import ROOT, files_of_repository

PACKAGES = ("vlmpipe", "trainer", "pipelines", "components")
SUFFIXES = {".py", ".yaml", ".j2"}
SCHEMA = ROOT / "docs/reference/run-file.schema.json"  # generated from the fields
TOP_PAGES = ("README.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md")
FIRST_WORDS = r"(Of|Those|That of|None|The same)\b"
OPENING = re.compile(rf'^ *[rf]?"""({FIRST_WORDS}|(As|Also|With|Without|Whom|What|Whether)\b).*', re.MULTILINE)
STOP_WORDS = re.compile(
    r"\b(anew|(?<!look )alike|nobody|somebody|heed(?:s|ed|ing)?|so\s+many|goes\s+on)\b.*", re.IGNORECASE
)
# "behind" for "after": not where something hides, lags or is left, or stands between a client and a service.
BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)
RIGHTLY_BEHIND = re.compile(
    r"\b(?:(?:hid\w*|lags?|leaves?|leave)\s(?:\S+\s){0,2}|left\s|points\s|steps\s|stand\s|reductions\s)behind\b"
    r"|\bbehind(?:\s(?:an?|the|its))?(?:\s`\w+`)?\s(?:KServe|Storage|feature|server|endpoint|proxy|gate|protocol|class|"
    r"command|launchers|address|local|warning|evaluation|the backward pass|nothing|AGENTS)\b"
    r'|else "behind"',
    re.IGNORECASE,
)
NO_PLACE = re.compile(
    r"never run|by this project|no model has|was seen|were tried", re.IGNORECASE
)  # history and proofs
TORN = re.compile(r"[a-z]- (?!and\b|or\b)[a-z]|  ")  # a word or a space at the seam of two parts of a text
# First sentences: a pronoun that stands before its noun, and a clause with "what" in place of the noun.
PRONOUN = re.compile(
    r"(?:It|They|Them|Its|Their|Which|Who|Whose)\b"
    r"|(?:That|Those|These|This|Both)(?= (?:of|is|are|was|were|has|have|for|in|which|whose|with|where)\b|[,.:;])"
    r"|One (?:that|for)\b"
    r"|(?:\S+ ){1,2}(?:it|they|them)\b"
)
WHAT_IS = re.compile(r"\b[Ww]hat (?:\S+ ){0,4}?(?:is|are|was|were|has|have)\b")
# Names that say nothing of their values. Fields are left: of an error (found, expected, fix), of
# records, and of a selection's kept tokens. `row` is that of a table. A number here may only fall, within SLACK.
SLACK = 5
MAX_BINDINGS = {
    "found": 11, "one": 0, "each": 0, "own": 0, "wanted": 2, "given": 0, "kept": 6, "said": 1, "mine": 0, "row": 77,
}  # fmt: skip
# Terms that the glossary replaces, in names: bounds are max_ and min_, pixels an image, the majority baseline is no
# chance, and the split that is not trained on is validation.
FORMER_TERMS = re.compile(r"(?:^|_)(?:most|least)_|at_most|at_least|chance|picture|held_?out|commonest", re.IGNORECASE)
# Users' run files and records of earlier runs hold these fields, which cannot be renamed. The rest are names of others.
KEPT_NAMES = {
    "min_margin_over_chance": "run file",
    "chance": "evaluate.json",
    "picture": "evaluate.json",
    "held_out": "chunks.jsonl",
    "most_usd_per_month": "plan.json",
    "most_common": "collections.Counter",
    "_PICTURES": "Unicode's control pictures",
    "_DELETE_PICTURE": "Unicode's control pictures",
    "_picture": "Unicode's control pictures",
}
DATA = {"trainer/evaluation/vqa_answers.py"}  # its contractions are data of the VQA score


def faults(text: str) -> list[str]:
    """Return the lines of `text` with a docstring's bad first words, or from a stop word on."""
    matches = (match.group().strip() for pattern in (OPENING, STOP_WORDS) for match in pattern.finditer(text))
    return [*matches, *behind(text)]


def behind(text: str) -> list[str]:
    """Return what surrounds each "behind" of `text` that means "after"."""
    right = [match.span() for match in RIGHTLY_BEHIND.finditer(text)]
    places = [match.span() for match in BEHIND.finditer(text)]
    wrong = [place for place in places if not any(start <= place[0] and place[1] <= end for start, end in right)]
    return [text[max(0, start - 40) : end + 40] for start, end in wrong]


def prose(page: str) -> str:
    """Return a page of Markdown without its blocks of code, code in lines and addresses of links."""
    page = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)\n]*\)", "]", re.sub(r"`[^`\n]*`", "``", page))


def descriptions(schema: Any) -> Iterator[str]:
    """Yield each description in a JSON Schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("description"), str):
            yield schema["description"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from descriptions(part)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_comments_and_messages_are_plain_english(package: str) -> None:
    paths = [path for path in sorted((ROOT / package).rglob("*")) if path.suffix in SUFFIXES]
    assert len(paths) > 10
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    assert {
        name: lines for name, path in names.items() if name not in DATA and (lines := faults(path.read_text()))
    } == {}


def test_pages_are_plain_english() -> None:
    pages = files_of_repository("docs/*.md", *TOP_PAGES)
    assert len(pages) > 60
    texts = {page.relative_to(ROOT).as_posix(): prose(page.read_text("utf-8")) for page in pages}
    matches = {name: [match.group() for match in STOP_WORDS.finditer(text)] for name, text in texts.items()}
    assert {name: lines for name, text in texts.items() if (lines := matches[name] + behind(text))} == {}


def test_code_on_a_page_is_no_prose() -> None:
    page = "Runs go on.\n\n```bash\nmake anew\n```\n\nNot `nobody` nor [them](alike.md); somebody"
    assert "somebody" in prose(page)
    assert not any(word in prose(page) for word in ("anew", "nobody", "alike"))


def test_descriptions_of_fields_say_what_the_field_is_without_its_history() -> None:
    texts = list(descriptions(json.loads(SCHEMA.read_text())))
    assert len(texts) > 300
    assert [text for text in texts if bad(text)] == []


def bad(description: str) -> bool:
    """Return whether a field's description has bad first words, a stop word, the field's history, or a torn word."""
    found = (pattern.search(description) for pattern in (STOP_WORDS, NO_PLACE, TORN))
    return bool(re.match(FIRST_WORDS, description) or any(found))


def test_bad_descriptions_are_found() -> None:
    assert (
        bad("Of softmax.") and bad("Layers in 8 bits. Never run on a GPU by this project.") and bad("So many pixels.")
    )
    assert bad("Sums over micro- batches.") and bad("Sums  over ranks.") and not bad("Inter- and intra-node.")
    assert not bad("Layers in 8 bits; none for no 8-bit products. For fsdp.")


@pytest.mark.parametrize(
    "text",
    [
        '    """Of the last step."""',
        '"""Those that fit."""',
        '    """None without a GPU."""',
        '"""What a module has."""',
        '    """Whether it fits."""',
        "# as if nobody had asked",
        'print("training goes on")',
        "for so\n    many tokens",
        "# tokens behind the end of a sample",
        "Heeds the variable",
    ],
)
def test_a_fault_is_found(text: str) -> None:
    assert len(faults(text)) == 1


def test_plain_english_has_no_fault() -> None:
    assert faults('"""Return the last step, or None before the first."""\n# of those that fit\nalike_view = 1') == []
    assert faults("A server behind a proxy that a stop left behind; DDP hides it behind the backward pass.") == []


def nodes() -> Iterator[ast.AST]:
    """Yield all nodes of the packages' code."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                yield from ast.walk(ast.parse(path.read_text()))


def name_of(node: ast.AST) -> str:
    """Return the name that a node defines or uses; "" for none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.arg | ast.keyword):
        return node.arg or ""
    return node.id if isinstance(node, ast.Name) else ""


@cache
def names() -> tuple[Counter[str], set[str]]:
    """Count the names that the code binds (variables, elements of loops, parameters), and collect all its names."""
    counts, used = Counter[str](), set[str]()
    for node in nodes():
        used.add(name_of(node))
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)) or isinstance(node, ast.arg):
            counts[name_of(node)] += 1
    return counts, used


def bindings() -> Counter[str]:
    return names()[0]


def test_names_have_the_terms_of_the_glossary() -> None:
    assert {name for name in names()[1] if FORMER_TERMS.search(name)} == KEPT_NAMES.keys()


@pytest.mark.parametrize("name", ["most_images", "MOST_TAGS", "at_most", "least_gib", "has_picture", "is_held_out"])
def test_a_former_term_is_found_in_a_name(name: str) -> None:
    assert FORMER_TERMS.search(name)


@pytest.mark.parametrize("name", ["max_images", "foremost_image", "almost", "image", "validation", "majority_baseline"])
def test_a_term_of_the_glossary_passes(name: str) -> None:
    assert not FORMER_TERMS.search(name)


@pytest.mark.parametrize("name", MAX_BINDINGS)
def test_names_say_what_they_hold(name: str) -> None:
    count, limit = bindings()[name], MAX_BINDINGS[name]
    assert count <= limit, f"call it by its noun: {count} variables are called {name}"
    assert count > limit - SLACK, f"lower MAX_BINDINGS[{name!r}] to {count}"


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:;])\s", " ".join(text.split("\n\n")[0].split()))[0]


def is_vague(text: str) -> bool:
    """Return whether the first sentence of a docstring or description has a pronoun or a clause for its noun."""
    sentence = first_sentence(text)
    return bool(PRONOUN.match(sentence) or WHAT_IS.search(sentence))


def docstrings() -> Iterator[str]:
    for node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_first_sentences_name_their_subject() -> None:
    fields = descriptions(json.loads(SCHEMA.read_text()))
    assert [first_sentence(text) for text in (*docstrings(), *fields) if is_vague(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "Its name in the service; None before it has one.", "Return whether it fits.", "Ask it to stop.",
        "Which runs may be removed.", "One that has a call of its own.", "Those of the last step.", "This is the rank.",
        "Read what the node has printed since.", "The packages, and what is not installed.",
    ],
)  # fmt: skip
def test_a_sentence_without_its_noun_is_vague(text: str) -> None:
    assert is_vague(text)


@pytest.mark.parametrize(
    "text",
    [
        "One step of a stage. It is run once.", "This rank's share of the gradients.", "Both sides' answers.",
        "Return whether the plan fits: what is left is free.", "Move a module and what belongs to it.",
    ],
)  # fmt: skip
def test_a_sentence_with_its_noun_passes(text: str) -> None:
    assert not is_vague(text)
