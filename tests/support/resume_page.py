"""The table of docs/reference/resuming.md, generated from the rules of a run that is continued."""

from __future__ import annotations

import re

from tests.support.paths import ROOT
from vlmpipe.runs.changed_settings import REST
from vlmpipe.trainer.checkpoint.resume_rules import OUTCOMES, RULES, Outcome

PAGE = ROOT / "docs/reference/resuming.md"
BLOCK = re.compile(r"(<!-- rules of a resume -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES: dict[Outcome, str] = {"taken": "taken", "same": "cannot matter", "prepared": "refused with the data"}
RULES_OF_ALL = (*RULES, *REST)


def resume_page(text: str) -> str:
    """The page with its table as the rules have it."""
    return BLOCK.sub(lambda block: f"{block[1]}{_table()}\n{block[2]}", text)


def _table() -> str:
    meaning = [f"| {TITLES.get(outcome, outcome)} | {text} |" for outcome, text in OUTCOMES.items()]
    rows = []
    for outcome in OUTCOMES:
        for rule in (rule for rule in RULES_OF_ALL if rule.outcome == outcome):
            rows.append(f"| {TITLES.get(outcome, outcome)} | {_fields(rule.fields)} | {rule.why} |")
    return "\n".join(
        [
            "\n| a changed value is | |\n|---|---|",
            *meaning,
            "\n| | fields | what they decide |\n|---|---|---|",
            *rows,
            "",
        ]
    )


def _fields(fields: tuple[str, ...]) -> str:
    return ", ".join(f"`{field}`" for field in fields)
