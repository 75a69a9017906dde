"""Answers of the model that a run starts from: where they are, what was asked, and what came of it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vlmpipe.trainer.records.record import Record


class ReplayPointer(Record):
    """Address of the answers that a run's source with replay reads: in the run's folder, and below the root for what
    knows no run, by the sections of the run file that decide it."""

    FILE: ClassVar[str] = "replay.json"
    STEP: ClassVar[str] = "choose-replay"

    folder: str = Field(description="Folder of questions and answers.")
    why_images: str = Field(
        "",
        description="Why this run asks about the other sources' images; empty where it asks the start's own questions.",
    )


class ReplayQuestions(Record):
    """Counts of the questions for the start model: written when all parts are there."""

    FILE: ClassVar[str] = "questions.json"
    STEP: ClassVar[str] = "choose-replay"

    parts: int = Field(description="Files of questions.")
    images: int = Field(description="Questions, each about one image.")
    training_images: int = Field(description="Distinct names of training images that the choice was made from.")
    image_bytes: int = Field(description="Bytes of the chosen images.")
    in_validation: int = Field(description="Chosen images left out because a validation sample has them.")
    repeated: int = Field(description="Chosen images left out because another one has the same bytes.")
    videos: int = Field(description="Native videos, which are not asked about.")
    start_data: str = Field("", description="Prepared data that the questions are from; empty for prompts.")
    unsuitable: int = Field(0, description="Samples of that data without a question about a single still image.")
    unread: int = Field(0, description="Chosen images that cannot be read, whose samples preparation rejects.")

    def described(self, why_images: str) -> str:
        """Describe the questions for people. why_images: why not questions of the start model's own data."""
        text = f"{self.images:,} questions for {self.training_images:,} training images, "
        text += f"{self.image_bytes / 1e6:,.1f} MB of images; "
        if self.start_data:
            text += f"questions and images of the start model's own training data, {self.start_data}"
        else:
            text += f"prompts about these images: {why_images}"
        left_out = {
            "about images of validation samples too": self.in_validation,
            "about images with the bytes of another": self.repeated,
            "native videos": self.videos,
            "samples without a question about a single still image": self.unsuitable,
            "images that cannot be read": self.unread,
        }
        counted = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
        return text + (f"; left out: {counted}" if counted else "")


class ReplayPart(Record):
    """Answers of one part of the questions; written after its samples, so that a restarted job takes up there."""

    FILE: ClassVar[str] = "counts.json"
    STEP: ClassVar[str] = "replay"

    answered: int = 0  # samples of the source
    cut: int = 0  # left out: longer than replay_max_new_tokens
    empty: int = 0
    refused: int = 0  # images that cannot be asked about
    answer_tokens: int = 0  # of all answers
    prompt_tokens: int = 0
    answer_s: float = 0.0


class ReplayAnswers(ReplayPart):
    """All answers: written last, which makes the source exist. answer_s: the sum over the job's processes."""

    FILE: ClassVar[str] = "replay_answers.json"

    def described(self, questions: ReplayQuestions) -> str:
        """Describe for people how the questions were answered."""
        text = f"{self.answered:,} answers of the start model to {questions.images:,} questions, "
        text += (
            f"{self.answer_tokens:,} tokens in {self.answer_s:,.0f} s, {questions.image_bytes / 1e6:,.1f} MB of images"
        )
        reasons = {
            "longer than replay_max_new_tokens": self.cut,
            "empty": self.empty,
            "of images that cannot be asked about": self.refused,
        }
        left_out = ", ".join(f"{count:,} {why}" for why, count in reasons.items() if count)
        return text + (f"; left out: {left_out}" if left_out else "")
