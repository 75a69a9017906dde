"""CPU time of making an image's pixel values, and the threads that share it. Imports no torch.

Figures are CPU time of one thread on an AMD EPYC, photos as JPEG (`make bench-data args='--only preparing'`,
benchmarks/results/2026-11-28-cpu-image-preparation.md).
"""

from __future__ import annotations

from typing import Literal

from vlmpipe.trainer.config.model import ImageKind
from vlmpipe.trainer.sizing.image_grids import FRAMES_PER_PATCH
from vlmpipe.trainer.sizing.model_shape import ModelShape

MAX_THREADS = 8  # of a rank at its start: what keeps most GPUs busy, and few that wait for Python's lock
FREE_BLOCKS = 2  # pieces of memory, each of a micro-batch's images, that wait for the next ones
CHANNELS = 3
SQUARE_S = 0.006  # a photo of half a megapixel, assumed, shrunk to a square: 3.5 ms of a quarter, 9.5 ms of a whole one
# Seconds for a megapixel. Patches: 19 to 22 ms.
# The library's processor, Qwen2-VL's, which family hf runs: 64 ms.
PATCHES_S, LIBRARY_S = 0.021, 0.066
THREAD_SHARE = 0.6  # of the rate alone that a thread has beside others: a vCPU is half a core. Assumed


def threads_of(cores: int, ranks: int) -> int:
    """Return the threads that each of `ranks` ranks that share a machine's cores begins with (data.loader_threads)."""
    return min(MAX_THREADS, max_threads_of(cores, ranks))


def max_threads_of(cores: int, ranks: int) -> int:
    """Return a rank's share of the cores, up to which it takes more threads while training waits for images."""
    return max(1, cores // ranks)


def preparation_s(images: ImageKind, shape: ModelShape) -> float:
    """CPU time of one image of the shape's size."""
    megapixels = shape.tower_tokens * shape.patch_pixels / CHANNELS / 1e6
    if images == "grids":
        return PATCHES_S * megapixels / FRAMES_PER_PATCH  # a still image fills all frames of its patches
    if images == "published":
        return LIBRARY_S * megapixels
    return SQUARE_S


def rank_preparation_s(
    images: ImageKind, shape: ModelShape, setting: int | Literal["auto"], *, cores: int, ranks: int
) -> float:
    """Wall time of one image in a rank's threads, while the other ranks of the machine prepare theirs.

    setting: data.loader_threads. More threads than cores give no more.
    """
    most = max_threads_of(cores, ranks)
    threads = most if setting == "auto" else min(setting, most)
    # What its threads gain with the library's processors was not measured on a machine with cores to give.
    threads = 1 if images == "published" else threads
    return preparation_s(images, shape) / (1 if threads == 1 else threads * THREAD_SHARE)
