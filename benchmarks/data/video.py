"""Part `video`: evenly spread frames of a video, as preparation reads them, beside PyAV by hand."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.data.video import JPEG_QUALITY
from vlmpipe.trainer.storage.local import LocalStorage

SECONDS, FPS, GOP = 10, 25, 25
CHOSEN = 8


def video(bench: Bench) -> None:
    """CPU time of eight frames of ten seconds, 1280 x 720, MPEG-4. Ours ends with a JPEG, as preparation stores it."""
    path = written(bench.scratch / "v.mp4", seconds=2 if bench.quick else SECONDS)
    sides = {
        "ours": lambda: of_ours(path),
        "PyAV": lambda: by_hand(path),
        "PyAV and JPEG": lambda: stored_by_hand(path),
    }
    found = bench.take_turns("frames", {label: timed(side) for label, side in sides.items()})
    pictures = {label: [len(frames) for _, frames in rounds] for label, rounds in found.items()}
    bench.report.require(
        {count for rounds in pictures.values() for count in rounds} == {CHOSEN}, "each round has eight frames"
    )
    seconds = {label: [cpu_s for cpu_s, _ in rounds] for label, rounds in found.items()}
    rates = {label: [CHOSEN / cpu_s for cpu_s in values] for label, values in seconds.items()}
    for claim, name in (
        ("frames of a video, stored", "PyAV and JPEG"),
        ("frames of a video, stored or decoded alone", "PyAV"),
    ):
        both = [Side(label, rates[label]) for label in ("ours", name)]
        bench.report.compare(claim, "1280 x 720, 25 a second", "frames per CPU second", *both)


def written(path: Path, *, seconds: int) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=FPS, options={"g": str(GOP)})
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 1280, 720, "yuv420p", 4_000_000
        for number in range(seconds * FPS):
            moved = np.roll(noise, 3 * number, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        container.mux(stream.encode())
    return path


def timed(side: Callable[[], list[Any]]) -> Callable[[], tuple[float, list[Any]]]:
    def run() -> tuple[float, list[Any]]:
        began_s = time.process_time()
        frames = side()
        return time.process_time() - began_s, frames

    return run


def of_ours(path: Path) -> list[Any]:
    files = ImageFiles(LocalStorage(path.parent), max_image_bytes=1 << 20, max_media_bytes=1 << 30)
    return [frame.read() for frame in files.video_frames(path.name, CHOSEN, 0)]


def by_hand(path: Path) -> list[Any]:
    container: Any = av.open(io.BytesIO(path.read_bytes()))
    with container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        length_s = float(stream.duration * stream.time_base)
        wanted = [length_s * (number + 0.5) / CHOSEN for number in range(CHOSEN)]
        found: list[Any] = []
        for frame in container.decode(stream):
            if len(found) < CHOSEN and frame.time + 1 / FPS > wanted[len(found)]:
                found.append(frame.to_image())
        return found


def stored_by_hand(path: Path) -> list[bytes]:
    """The same, and a JPEG of each frame at our quality."""
    stored = []
    for image in by_hand(path):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=JPEG_QUALITY)
        stored.append(buffer.getvalue())
    return stored
