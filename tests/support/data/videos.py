"""Short videos whose frames spell their number, and reading it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from vlmpipe.trainer.data.sample import ImageRef

FPS, FRAMES = 10, 40  # four seconds
BITS = 6  # black and white columns that spell a frame's number
GOP = 12  # frames between those that stand alone


def write_video(path: Path, frames: int = FRAMES, **options: str) -> Path:
    with av.open(str(path), "w", options=options) as container:
        stream: Any = container.add_stream("mpeg4", rate=FPS, options={"g": str(GOP), "qscale": "1"})
        stream.width, stream.height, stream.pix_fmt = 16 * BITS, 48, "yuv420p"
        for number in range(frames):
            columns = np.repeat([255 * (number >> bit & 1) for bit in range(BITS)], 16).astype(np.uint8)
            picture = np.broadcast_to(columns[None, :, None], (48, 16 * BITS, 3)).copy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def shown(reference: ImageRef) -> Image.Image:
    return Image.open(io.BytesIO(reference.read())).convert("RGB")


def frame_in(reference: ImageRef) -> int:
    middles = np.asarray(shown(reference))[24, 8::16, 0]
    return sum(1 << bit for bit, level in enumerate(middles) if level > 127)
