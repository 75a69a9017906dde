"""Titles of commits: what the change does, in the imperative, short enough for every list."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.paths import ROOT

COMMITS = 200
MAX_CHARACTERS = 72
# Of verbs, these endings are those of "renamed", "renaming" and "renames".
INFLECTED = re.compile(r"\w+(ed|ing|[^su]s)")
IMPERATIVES = {"Bring", "Embed", "Feed", "Need", "Proceed", "Seed", "Shed", "Speed", "String", "Bias", "Canvas"}


def git(*words: str) -> str:
    """Return the output of git; skips where this is not a whole clone."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history of git is here")


def fault(title: str) -> str | None:
    """Return what is wrong with a commit's title, or None."""
    verb = re.split(r"\W", title, maxsplit=1)[0]
    if len(title) > MAX_CHARACTERS:
        return f"{len(title)} characters, at most {MAX_CHARACTERS}"
    if not re.fullmatch(r"[A-Z][a-z]+", verb):
        return "begins with no capital verb"
    if INFLECTED.fullmatch(verb) and verb not in IMPERATIVES:
        return f"{verb} is not imperative"
    return None


def test_titles_of_commits_are_short_and_imperative() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("a shallow clone has no history")
    titles = git("log", f"-{COMMITS}", "--no-merges", "--format=%s").splitlines()
    assert titles
    assert {title: reason for title in titles if (reason := fault(title))} == {}


@pytest.mark.parametrize(
    "title",
    ["Renamed rows", "Renaming rows", "Renames rows", "rename rows", "WIP", "fix: rows", "", "N" + "x" * 72],
)
def test_another_title_is_refused(title: str) -> None:
    assert fault(title) is not None


@pytest.mark.parametrize("title", ["Rename rows to sequences", "Pass the mesh to strategies", "Seed each stream"])
def test_an_imperative_title_passes(title: str) -> None:
    assert fault(title) is None
