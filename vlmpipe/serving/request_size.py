"""Requests that an endpoint would refuse for their size, found before anything is deployed."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.serving.openai import request_body
from vlmpipe.serving.questions import ValidationQuestion
from vlmpipe.trainer.errors import DataError


def require_small_requests(
    questions: Sequence[ValidationQuestion], name: str, endpoint: str, max_bytes: int, *, limit_of: str, fix: str = ""
) -> None:
    """Raise DataError for questions to the model `name` that are larger than `max_bytes`.

    Args:
        endpoint: where they would be asked.
        limit_of: whose limit it is, for the message.
        fix: what helps besides smaller images, ending in "or ".
    """
    sizes = {question.id: len(request_body(name, question.messages, question.max_new_tokens)) for question in questions}
    too_large = [identity for identity, size in sizes.items() if size > max_bytes]
    if not too_large:
        return
    largest = max(sizes, key=sizes.__getitem__)
    raise DataError(
        f"{len(too_large)} of {len(questions)} validation questions are too large for {endpoint}: {largest} takes "
        f"{sizes[largest] / 1e6:,.1f} MB with its images",
        expected=f"requests of at most {max_bytes / 1e6:.3g} MB, the limit of {limit_of}",
        fix=f"{fix}prepare the data with smaller images",
    )
