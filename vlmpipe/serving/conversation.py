"""A conversation with a run's model about one image: each question is asked after the earlier ones and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.evaluation.answer import Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.prediction.predict import Predictor


@dataclass(frozen=True)
class Reply:
    """forgotten: turns that no longer fitted into data.sequence_length, the oldest, which the model did not see."""

    text: str
    forgotten: int = 0


@dataclass
class Conversation:
    """turns: what was said and answered, without the image's mark."""

    predictor: Predictor
    image: Path
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> Reply:
        """The model's answer, which later questions are asked after.

        Raises DataError for an image or a question that cannot be asked about.
        """
        job, model = self.predictor.job, self.predictor.model
        with os_errors(f"reading {self.image}"):
            data = self.image.read_bytes()
        alone, forgotten = ask_about(job, model.chat, question, data, str(self.image)), 0
        most = job.evaluate.max_new_tokens
        asked = after(alone, question, self.turns)
        while asked.earlier and self._tokens(asked) + most > job.data.sequence_length:
            forgotten += 1
            asked = after(alone, question, self.turns[forgotten:])
        (answer,) = answer_questions(job, model, [asked], self.predictor.device, max_new_tokens=most)
        self.turns = self.turns[forgotten:]
        if answer.text.strip():  # many templates refuse a question after one without an answer
            self.turns.append(Turn(question, answer.text))
        return Reply(answer.text, forgotten)

    def _tokens(self, asked: Asked) -> int:
        chat = self.predictor.model.chat
        return len(chat.prompt(asked.turn, asked.prompted.counts, asked.prompted.sizes, asked.earlier))


def after(alone: Asked, question: str, earlier: Sequence[Turn]) -> Asked:
    """The question after earlier turns, the first of which shows the image."""
    if not earlier:
        return alone
    first = replace(earlier[0], question=f"{IMAGE_TOKEN}\n{earlier[0].question}")
    return replace(alone, turn=replace(alone.turn, question=question), earlier=[first, *earlier[1:]])
