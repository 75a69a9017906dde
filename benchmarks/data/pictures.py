"""Part `pictures`: what preparation does to a picture beside Pillow's bare decoding."""

from __future__ import annotations

import io

from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.support.suite import Bench
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.checks import check_image

COUNT = 64


def pictures(bench: Bench) -> None:
    """Ours decodes, checks, strips metadata and hashes; photographs of a usual size, JPEG without and with EXIF."""
    found = photographs(8 if bench.quick else COUNT)
    config = DataConfig(source="unused.jsonl", sequence_length=256)
    works = {
        "ours": lambda: sum(len(check_image(data, config).data) > 0 for data in found),
        "bare": lambda: sum(bare(data) for data in found),
    }
    times = bench.take_timed_turns("pictures", works)
    ours, by_hand = ("prepared", times["ours"]), ("decoded only (Pillow)", times["bare"])
    bench.report.compare_rates("pictures: prepared or decoded alone", "600 x 400 JPEG", "pictures", ours, by_hand)


def photographs(count: int) -> list[bytes]:
    """Crops of scikit-learn's two photographs; every second one with metadata."""
    scenes = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    found = []
    for number in range(count):
        left, top = number % 40, number % 27
        buffer, exif = io.BytesIO(), Image.Exif()
        exif[0x010E] = "a photograph"
        crop = scenes[number % 2].crop((left, top, left + 600, top + 400))
        crop.save(buffer, "JPEG", quality=90, **({"exif": exif} if number % 4 > 1 else {}))
        found.append(buffer.getvalue())
    return found


def bare(data: bytes) -> int:
    Image.open(io.BytesIO(data)).load()
    return 1
