"""Answers to the values of a corrected message: the run-file fields that take them."""

from __future__ import annotations

from typing import Generic, TypeVar

from vlmpipe.importing.findings import Outcome, Path
from vlmpipe.importing.job_specs.draft import Draft
from vlmpipe.importing.translation import Setting, Translation

NO_FIELD = "a run file has no field for it"
AnyDraft = TypeVar("AnyDraft", bound=Draft)


class Answers(Generic[AnyDraft]):
    """Sets run-file fields from paths of the corrected spec, and answers the values of the file that stand there."""

    def __init__(self, translation: Translation, draft: AnyDraft) -> None:
        self.translation, self.draft = translation, draft

    def take(self, path: Path, field: str, value: object = None, reason: str = "") -> None:
        """Set a field from the value at a path; the reasons of corrections become its comment."""
        value = self.draft.get(path) if value is None else value
        mended = [text for place, text in self.draft.comments.items() if place[: len(path)] == path]
        text = "; ".join(filter(None, [*mended, reason]))
        self.translation.settings[field] = Setting(value, text, is_given=True)
        self.note(path, Outcome.CHANGED if reason else None, field, reason)

    def note(self, path: Path, outcome: Outcome | None, field: str, reason: str) -> None:
        """Answer the values at a path; None keeps what the corrections made of them."""
        ledger = self.translation.ledger
        for leaf in [leaf for leaf, place in self.draft.at.items() if place[: len(path)] == path]:
            before = ledger.finding(leaf)
            because = "; ".join(filter(None, (before.reason, reason)))
            ledger.note(leaf, outcome or before.outcome, field, because)
            del self.draft.at[leaf]

    def drop(self, path: Path, reason: str) -> None:
        self.note(path, Outcome.DROPPED, "", reason)

    def refuse(self, path: Path, reason: str) -> None:
        self.note(path, Outcome.REFUSED, "", reason)

    def rest(self) -> None:
        """Refuse keys that no field has taken."""
        for path in list(self.draft.at.values()):
            self.refuse(path, NO_FIELD)
