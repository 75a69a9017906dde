"""Rules VP70x: secrets in a job spec. Nothing here returns a secret, or part of one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.secret_detection import form_of_secret, is_secret_name, may_be_secret
from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.violation import Violation

_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_ASSIGNMENT = re.compile(r"(?:^|[\s;&'\"])-{0,2}([A-Za-z][\w-]*)[=](\"[^\"]*\"|'[^']*'|[^\s;&]*)")
FIX = "read it from Secret Manager in the program, as the job's service account; the spec is visible to many"


def check(job: Job) -> Iterator[Violation]:
    """Secrets in environment, command and arguments."""
    for pool in job.pools:
        for path, name, value in pool.environment():
            if is_secret_name(name) and may_be_secret(name, value):
                yield Violation("VP701", path, f"{name} with a value of {len(value)} characters", "no secrets", FIX)
            elif form := form_of_secret(value):
                found = f"{name} with {form} of {len(value)} characters"
                yield Violation("VP702", path, found, "no secrets", FIX)
        for path, task in pool.tasks():
            for field in ("command", "args"):
                for index, found in _in_words(task.get(field) or []):
                    yield Violation("VP703", (*path, field, index), found, "no secrets", FIX)


def _in_words(words: list[str]) -> Iterator[tuple[int, str]]:
    """Index of the word, and what is there; one finding a word."""
    for index, word in enumerate(words):
        option = _OPTION.fullmatch(words[index - 1]) if index else None
        named = [
            name for name, value in _ASSIGNMENT.findall(word) if is_secret_name(name) and may_be_secret(name, value)
        ]
        if named:
            yield index, f"{named[0]} with a value"
        elif option and is_secret_name(option[1]) and not word.startswith("-") and may_be_secret(option[1], word):
            yield index, f"a value for --{option[1]}"
        elif form := form_of_secret(word) or form_of_secret(word.partition("=")[2]):
            yield index, f"{form} of {len(word)} characters"
