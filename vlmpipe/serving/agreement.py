"""Check whether a server answers as evaluation did: the same validation questions, greedily, text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from vlmpipe.serving.openai import Answer
from vlmpipe.serving.questions import Chat, ValidationQuestion
from vlmpipe.trainer.errors import ExitCode, UserError

Ask = Callable[[Chat, int], Answer]
SHOWN = 3
REPLACEMENT = "\ufffd"  # what decoders show for bytes that are no character


@dataclass(frozen=True)
class Disagreement:
    """An answer that is another than the evaluation's, or ends for another reason."""

    id: str
    turn: int
    evaluated: str
    served: str
    evaluated_finish: str = ""
    served_finish: str = ""


@dataclass(frozen=True)
class Agreement:
    """How many of the asked questions were answered as in the evaluation.

    cut: of those, answers that end within a character, of which the server leaves out what evaluation shows as U+FFFD.
    spaced: answers that the server gives with white space around them. unfinished: those whose end was not compared,
    because one side does not say why they end.
    """

    asked: int
    disagreements: tuple[Disagreement, ...]
    cut: int = 0
    spaced: int = 0
    unfinished: int = 0

    @property
    def share(self) -> float:
        return 1 - len(self.disagreements) / self.asked

    def sentence(self) -> str:
        agreed = self.asked - len(self.disagreements)
        shown = "; ".join(_shown(disagreement) for disagreement in self.disagreements[:SHOWN])
        notes = [
            f"{count} {what}"
            for count, what in (
                (self.cut, "of them but for an incomplete character at their end"),
                (self.spaced, "with white space around them, which evaluation takes off"),
                (self.unfinished, "without a reason for their end to compare"),
            )
            if count
        ]
        told = [*([shown] if shown else []), *notes]
        return f"{agreed} of {self.asked} validation questions answered as in evaluation" + (
            f" ({'; '.join(told)})" if told else ""
        )

    def as_json(self) -> dict[str, object]:
        return {
            "asked": self.asked,
            "agreement": self.share,
            "cut_in_a_character": self.cut,
            "with_white_space": self.spaced,
            "finish_not_compared": self.unfinished,
            "disagreements": [asdict(disagreement) for disagreement in self.disagreements],
        }


def measure_agreement(questions: Sequence[ValidationQuestion], ask: Ask) -> Agreement:
    """Ask all questions. Raises the UserError of the first that the server does not answer."""
    other: list[Disagreement] = []
    cut = spaced = unfinished = 0
    for question in questions:
        answer = ask(question.messages, question.max_new_tokens)
        ends = (question.finish_reason, answer.finish_reason)
        is_cut = answer.text != question.evaluated and is_cut_copy(question.evaluated, answer.text)
        spaced += answer.has_space
        unfinished += not all(ends)
        is_same = is_cut or answer.text == question.evaluated
        if is_same and (ends[0] == ends[1] or not all(ends)):
            cut += is_cut
        else:
            other.append(Disagreement(question.id, question.turn, question.evaluated, answer.text, *ends))
    return Agreement(len(questions), tuple(other), cut, spaced, unfinished)


def is_cut_copy(evaluated: str, served: str) -> bool:
    """Return whether `served` is `evaluated` without the bytes at its end that are no whole character."""
    return evaluated.endswith(REPLACEMENT) and evaluated.rstrip(REPLACEMENT).strip() == served


def _shown(answer: Disagreement) -> str:
    ends = f" ({answer.evaluated_finish})", f" ({answer.served_finish})"
    if answer.evaluated_finish == answer.served_finish or not (answer.evaluated_finish and answer.served_finish):
        ends = "", ""
    return f"{answer.id} turn {answer.turn}: evaluated {answer.evaluated!r}{ends[0]}, served {answer.served!r}{ends[1]}"


def require_agreement(agreement: Agreement, least: float) -> None:
    """Raise UserError (exit 76) where fewer questions than the share `least` were answered as in evaluation."""
    if agreement.share < least:
        raise UserError(
            f"the server does not answer as the evaluation: {agreement.sentence()}",
            expected=f"the same greedy answers to {least:.0%} of them",
            fix="compare versions of transformers, precision, chat template and image processor of both; a model in "
            "bf16 differs in single answers: lower the share",
            code=ExitCode.REJECTED,
        )
