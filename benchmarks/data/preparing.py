"""Part `preparing`: images of a step made into pixel values, beside the library's own processor; by family and size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.tiny_native import CONFIGS, SQUARE
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models import image_threads
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.pixels import decoded
from vlmpipe.trainer.models.registry import family_of

SIDES = (512, 1024)  # pixels: a quarter of a megapixel, and one
COUNT = 8
MAX_PIXELS = 1280 * 28 * 28  # as Qwen's models are published, so that neither size is shrunk
# Of a tiny model, with patches and windows of the published size.
VISION = CONFIGS["qwen2_5_vl"]["vision_config"] | {"patch_size": 14, "window_size": 112}
QWEN: dict[str, Any] = {
    "family": "qwen2_5_vl",
    "pretrained": {"config": CONFIGS["qwen2_5_vl"] | {"vision_config": VISION}},
    "min_pixels": 56 * 56,
    "max_pixels": MAX_PIXELS,
}
# As published models are: the side of a square, tiles of 512 pixels up to 2,048, patches of Qwen's models.
MODELS: dict[str, dict[str, Any]] = {
    "llava (336 pixels)": {"image_size": 336},
    "smolvlm (tiles up to 1536)": {"family": "smolvlm_tiles", "image_size": 512, "longest_edge": 1536}
    | {"pretrained": {"config": CONFIGS["smolvlm"] | {"vision_config": SQUARE | {"image_size": 512}}}},
    "qwen2_5_vl": QWEN,
}


def preparing(bench: Bench) -> None:
    """CPU time of an image; and for Qwen's patches the processor's own loop, whose bits ours must be."""
    sides = SIDES[:1] if bench.quick else SIDES
    bench.expect(len(sides) * (len(MODELS) + 1))
    for side in sides:
        data = f"{side} x {side} JPEG"
        found = photographs(side, 2 if bench.quick else COUNT)
        for name, changes in MODELS.items():
            prepare = image_preparer(model_config(**changes))
            times = bench.take_timed_turns(f"{name}, {data}", {"ours": counted(prepare, found, threads=1)})
            of_each = [1000 * one.cpu_per_unit for one in times["ours"]]
            bench.report.figure(f"an image prepared: {name}", data, "ms of CPU time", Side("one thread", of_each))
        beside_the_processor(bench, data, found)


def beside_the_processor(bench: Bench, data: str, found: Sequence[bytes]) -> None:
    """One thread beside one by CPU time; two threads beside one by wall time, on a machine with two cores to give."""
    config = model_config(**MODELS["qwen2_5_vl"])
    prepare, loop, pillow = image_preparer(config), processor_loop(config), decoding_and_resizing(config)
    values = prepare(found).values
    same = isinstance(values, Tensor) and torch.equal(values, loop(found))
    bench.report.require(same, "our patches are the processor's to the bit")
    works = {
        "one": counted(prepare, found, threads=1),
        "two": counted(prepare, found, threads=2),
        "loop": counted(loop, found, threads=1),
        "shared": counted(pillow, found, threads=1),
    }
    times = bench.take_timed_turns(f"patches, {data}", works)
    baseline = ("the processor's own loop", times["loop"])
    bench.report.compare_rates("patches: one thread", data, "images", ("fused", times["one"]), baseline)
    bench.report.compare_rates("patches: two threads", data, "images", ("fused, two threads", times["two"]), baseline)
    shared = ("decoding and resizing alone, which both do", times["shared"])
    bench.report.compare_rates("patches: the most that is possible", data, "images", shared, baseline)
    rates = {name: [one.units / one.wall_s for one in measured] for name, measured in times.items()}
    bench.report.compare(
        "patches a second and rank, two cores", data, "images", Side("fused", rates["two"]), Side("loop", rates["loop"])
    )


def counted(prepare: Callable[[Sequence[bytes]], object], found: Sequence[bytes], *, threads: int) -> Callable[[], int]:
    """Preparing `found` in so many threads. They are those of the round before, as in training: new ones would copy the
    processor, and take new memory, in the time that is measured."""

    def work() -> int:
        with on_threads(threads):
            prepare(found)
        return len(found)

    return work


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Prepare images in so many threads, whatever the machine has. Threads stay until others are asked for."""
    with mock.patch.object(image_threads, "num_threads", lambda: threads):
        if threads > 1 and image_threads._pool()._max_workers != threads:
            image_threads._pool().shutdown()
            image_threads._pool.cache_clear()
        yield


def processor_loop(config: ModelConfig) -> Callable[[Sequence[bytes]], Tensor]:
    """What a data loader with the library's processor does: image by image."""
    processor = family_of(config).image_processor(config)
    assert image_form_of(config).grids

    def prepare(found: Sequence[bytes]) -> Tensor:
        pictures = (Image.open(io.BytesIO(data)).convert("RGB") for data in found)
        made = [processor([picture], return_tensors="pt")["pixel_values"] for picture in pictures]
        return torch.cat(made)

    return prepare


def decoding_and_resizing(config: ModelConfig) -> Callable[[Sequence[bytes]], None]:
    """Pillow's part of an image, to the size in which it is cut into patches."""
    processor, grids = family_of(config).image_processor(config), image_form_of(config).grids
    assert grids

    def prepare(found: Sequence[bytes]) -> None:
        for data in found:
            picture = decoded(data)
            rows, columns = grids.of(*picture.size)
            picture.resize((columns * grids.patch, rows * grids.patch), Image.Resampling(processor.resample))

    return prepare


def photographs(side: int, count: int) -> list[bytes]:
    """Square crops of scikit-learn's two photographs, enlarged to `side` pixels."""
    scenes = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    found = []
    for number in range(count):
        left, top = number % 40, number % 27
        buffer = io.BytesIO()
        crop = scenes[number % 2].crop((left, top, left + 400, top + 400)).resize((side, side))
        crop.save(buffer, "JPEG", quality=90)
        found.append(buffer.getvalue())
    return found
