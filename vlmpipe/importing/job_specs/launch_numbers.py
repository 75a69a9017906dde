"""Numbers of processes and nodes that a job spec tells a launcher, corrected to those of the pools (VP216, VP217).

Ranks and addresses of nodes are known when a job runs, and stay with a comment.
"""

from __future__ import annotations

import re

from vlmpipe.importing.findings import Path
from vlmpipe.importing.job_specs.draft import SpecDraft
from vlmpipe.job_spec.violation import Violation

_FIX = re.compile(r"(--?[A-Za-z][\w-]*)[= ](\d+)(,.*)?")
_TORCHRUN = re.compile(r"((?:^|(?<=[\s/]))torchrun|torch\.distributed\.(?:run|launch))(?=\s|$)")


def with_right_number(draft: SpecDraft, violation: Violation) -> tuple[Path, list[str]] | None:
    """The words with the number that a violation names, and their path; None where none is to be replaced."""
    fix = _FIX.fullmatch(violation.fix)
    if violation.code not in ("VP216", "VP217") or not fix or len(violation.field) < 3:
        return None
    place, option, number = violation.field[:3], re.sub("[-_]", "[-_]", fix[1].lstrip("-")), fix[2]
    pattern = re.compile(rf"((?:^|(?<=\s))--?{option})(=|\s+)\d+(?=\s|$)")
    for name in ("command", "args"):
        words = list(draft.get((*place, name)) or ())
        for index, word in enumerate(words):
            is_value = index > 0 and word.isdigit() and re.fullmatch(rf"--?{option}", words[index - 1])
            changed = number if is_value else pattern.sub(rf"\g<1>\g<2>{number}", word)
            if changed != word:
                return (*place, name), [*words[:index], changed, *words[index + 1 :]]
    return _with_a_number(draft, place, f"{fix[1]}={number}") if fix[1] == "--nproc_per_node" else None


def _with_a_number(draft: SpecDraft, place: Path, option: str) -> tuple[Path, list[str]] | None:
    """The words with an option of torchrun that is missing."""
    for name in ("command", "args"):
        words = list(draft.get((*place, name)) or ())
        for index, word in enumerate(words):
            if _TORCHRUN.fullmatch(word.rpartition("/")[2]):
                return (*place, name), [*words[: index + 1], option, *words[index + 1 :]]
            if _TORCHRUN.search(word):
                text = _TORCHRUN.sub(rf"\1 {option}", word, count=1)
                return (*place, name), [*words[:index], text, *words[index + 1 :]]
    return None
