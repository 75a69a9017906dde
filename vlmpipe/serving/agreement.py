"""Whether a server answers as evaluation did: the same held-out questions, greedily, text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlmpipe.serving.openai import Answer
from vlmpipe.serving.questions import Chat, HeldOutQuestion
from vlmpipe.trainer.errors import ExitCode, UserError

Ask = Callable[[Chat, int], Answer]
SHOWN = 3


@dataclass(frozen=True)
class Disagreement:
    id: str
    turn: int
    evaluated: str
    served: str


@dataclass(frozen=True)
class Agreement:
    """How many of the asked questions were answered as in the evaluation."""

    asked: int
    disagreements: tuple[Disagreement, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.disagreements) / self.asked

    def sentence(self) -> str:
        agreed = self.asked - len(self.disagreements)
        shown = "; ".join(
            f"{one.id} turn {one.turn}: evaluated {one.evaluated!r}, served {one.served!r}"
            for one in self.disagreements[:SHOWN]
        )
        return f"{agreed} of {self.asked} held-out questions answered as in evaluation" + (shown and f" ({shown})")

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "agreement": self.share,
            "disagreements": [asdict(one) for one in self.disagreements],
        }


def measure_agreement(questions: Sequence[HeldOutQuestion], ask: Ask) -> Agreement:
    """Ask all questions. Raises the UserError of the first that the server does not answer."""
    other = []
    for question in questions:
        served = ask(question.messages, question.max_new_tokens).text
        if served != question.evaluated:
            other.append(Disagreement(question.id, question.turn, question.evaluated, served))
    return Agreement(len(questions), tuple(other))


def require_agreement(found: Agreement, least: float) -> None:
    """Raise UserError (exit 76) where fewer questions than the share `least` were answered as in evaluation."""
    if found.share < least:
        raise UserError(
            f"the server does not answer as the evaluation: {found.sentence()}",
            expected=f"the same greedy answers to {least:.0%} of them",
            fix="compare versions of transformers, precision, chat template and image processor of both; a model in "
            "bf16 differs in single answers: lower the share",
            code=ExitCode.REJECTED,
        )
