"""Check whether an answer is learned: weights and flags of the loss that messages carry."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpipe.trainer.data.conversations.message_parts import kind_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

# OpenAI's and ms-swift's, which are of answers only; and those of trainers that learn any message (axolotl's sharegpt).
ANSWER_FLAGS = ("weight", "loss", "loss_scale", "loss_weight")
MESSAGE_FLAGS = ("train", "training", "train_on", "train_on_turn")
LOSS_FLAGS = frozenset({*ANSWER_FLAGS, *MESSAGE_FLAGS})


def is_learned(message: Mapping[str, object], place: str, *, is_answer: bool) -> bool:
    """False for an answer whose weight is 0 or whose loss is false: it is read and is no label.

    Sources: https://platform.openai.com/docs/guides/supervised-fine-tuning (weight, 0 or 1),
    https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (loss, loss_scale),
    https://docs.axolotl.ai/docs/dataset-formats/conversation.html (train).

    Raises RejectedError, which names `place`, for a share of the loss, for flags that disagree, and for a question that
    is to be learned.
    """
    flags = {name: message[name] for name in LOSS_FLAGS & message.keys() if message[name] is not None}
    if not flags:
        return True
    for name, value in sorted(flags.items()):
        if not isinstance(value, bool | int | float):
            raise _refused(f"{place}.{name} is {kind_of(value)}, not 0 or 1, true or false")
        if value not in (0, 1):
            message_text = f"{place}.{name} is {value:g}: an answer is learned (1) or only read (0), not to a share"
            raise _refused(message_text)
        if value and not is_answer and name in MESSAGE_FLAGS:
            raise _refused(f"{place}.{name} is {value}, and only answers are learned")
    if is_answer and len({bool(value) for value in flags.values()}) > 1:
        named = " and ".join(sorted(flags))
        raise RejectedError(RejectCode.RECORD_CONFLICT, f"{place} has {named}, which disagree")
    return bool(next(iter(flags.values())))


def _refused(message: str) -> RejectedError:
    return RejectedError(RejectCode.CONV_LABELS, message)
