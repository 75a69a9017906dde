"""How many questions an evaluation answers at once, as its plan and the evaluation itself count them."""

from __future__ import annotations

MAX_IMAGES = 64  # whose pixels and features are held at once; tower and projector take `features.batch_images`


def questions_at_once(batch_questions: int, batch_tokens: int, tokens: float, images: float) -> int:
    """Questions of one batch, at least one.

    Args:
        batch_questions: `evaluate.batch_questions`.
        batch_tokens: `evaluate.batch_tokens`.
        tokens: of one question's prompt and longest answer.
        images: of one question.
    """
    by_images = int(MAX_IMAGES / images) if images > 0 else batch_questions
    return max(1, min(batch_questions, int(batch_tokens / max(tokens, 1)), by_images))
