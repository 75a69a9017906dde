"""Part `pictures`: what preparation does to a picture beside Pillow's bare decoding."""

from __future__ import annotations

import io

from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.near_duplicates.signature import MIN_COPY_SIDE, Box, image_signature
from vlmpipe.trainer.data.prepare.validation.checks import check_image

COUNT = 64


def pictures(bench: Bench) -> None:
    """Ours decodes, checks, strips metadata, hashes, finds a signature; photographs, JPEG without and with EXIF."""
    found = photographs(8 if bench.quick else COUNT)
    config = DataConfig(source="unused.jsonl", sequence_length=256)
    copies = [small_copy(data) for data in found]
    works = {
        "signature": lambda: sum(len(image_signature(*copy)) > 0 for copy in copies),
        "ours": lambda: sum(len(check_image(data, config).data) > 0 for data in found),
        "bare": lambda: sum(bare(data) for data in found),
    }
    times = bench.take_timed_turns("pictures", works)
    ours, by_hand = ("prepared", times["ours"]), ("decoded only (Pillow)", times["bare"])
    bench.expect(2)
    bench.report.compare_rates("pictures: prepared or decoded alone", "600 x 400 JPEG", "pictures", ours, by_hand)
    milliseconds = [1e3 * each.cpu_per_unit for each in times["signature"]]
    bench.report.figure("signature within preparation", "600 x 400 JPEG", "CPU ms", Side("signature", milliseconds))


def small_copy(data: bytes) -> tuple[Image.Image, Box]:
    """As preparation decodes a JPEG that is kept."""
    image = Image.open(io.BytesIO(data))
    drafted = image.draft(None, (MIN_COPY_SIDE, MIN_COPY_SIDE))
    assert drafted
    image.load()
    return image, drafted[1]


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
