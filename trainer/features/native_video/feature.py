"""Hooks of native videos. Preparation imports no torch, so what needs it is imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.features.native_video.chat import require_videos
from vlmpipe.trainer.features.native_video.clip import clip_reference
from vlmpipe.trainer.hooks.feature import Feature

if TYPE_CHECKING:
    from torch import Tensor, nn


class NativeVideo(Feature):
    """Makes one image of each video. A `VideoReader` of data sources and a `ChatCheck`."""

    def image_of_video(self, files: ImageFiles, path: str, data: DataConfig) -> ImageRef:
        return clip_reference(files, path, data.video_frames, data.video_fps)

    def require_chat(self, chat: Chat, model: ModelConfig) -> None:
        require_videos(chat, model)

    def generation_inputs(
        self, model: nn.Module, inputs: dict[str, object], projected: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> dict[str, object]:
        from vlmpipe.trainer.features.native_video.generation import with_videos

        return with_videos(model, inputs, projected, sizes)


FEATURE = NativeVideo()
