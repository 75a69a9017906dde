"""Checks that a model, its tokenizer and its chat template have tokens for videos."""

from __future__ import annotations

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.grid_images import VIDEO_TOKEN


def require_videos(chat: Chat, model: ModelConfig) -> None:
    """Raise ConfigError where the model, its tokenizer or the chat template has no videos but as images."""
    problems = {
        f"model.family {model.family} takes none in this form": chat.form.videos is None,
        f"model.tokenizer {model.tokenizer!r} lacks {VIDEO_TOKEN}": len(chat.vision_token_ids) == 1,
        "the chat template writes none between the tokens that are around an image": not _writes_videos(chat),
    }
    if problem := next((text for text, is_so in problems.items() if is_so), ""):
        raise ConfigError(
            f"data.video is native, and {problem}",
            expected="a Qwen2.5-VL or Qwen3-VL with its own tokenizer and chat template, and patches of 2 frames",
            fix="set data.video: frames, which makes images of a video's frames",
        )


def _writes_videos(chat: Chat) -> bool:
    """Return whether the template puts a video's token exactly where it puts an image's."""
    if chat.as_text:
        return True  # the template writes a text, in which we put the tokens ourselves
    of_each = []
    for kind in ("image", "video"):
        content = [{"type": kind}, {"type": "text", "text": "What is this?"}]
        try:
            of_each.append(chat.template.render([{"role": "user", "content": content}]))
        except RejectedError:
            return False
    return of_each[1] == of_each[0].replace(chat.placeholder, VIDEO_TOKEN) != of_each[0]
