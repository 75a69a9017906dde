"""Check whether caching vision features pays compared with running the frozen tower in each epoch.

Online, a packed sequence computes Fv + 3 Fl + 3 Fp (tower, language model, projector; 2 Fl for a frozen language model,
plus recomputation); with the cache, all but Fv. So the cache makes computing (Fv + 3 Fl + 3 Fp) / (3 Fl + 3 Fp) times
faster (terms: `vlmpipe.trainer.sizing.flops`). It costs one pass of the tower, in bf16 where training computes so, or
where that takes longer the preparation of the images or the write, which overlap with it; and storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.pipeline_partition import sequence_flops
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.time.computing import compute_seconds, moved_bytes, reached
from vlmpipe.planner.time.saving import SAVE_BYTES_PER_S
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.flops import tower_flops_per_image
from vlmpipe.trainer.sizing.image_preparation import rank_preparation_s, threads_of
from vlmpipe.trainer.sizing.model_shape import ModelShape

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

GIB = 2**30  # what Google bills by where its price lists say GB
FEATURE_BYTES = 2  # bf16
LARGE_BYTES = 10**12  # of a store whose size, price and break-even are stated
STORED_MONTHS = 1  # for which features are assumed to be stored


@dataclass(frozen=True)
class CacheAdvice:
    """Amounts over the whole run where the number of images is known, else None."""

    state: Literal["on", "off"]  # what the run does
    pays: bool | None  # what the numbers say; None where a cache is not possible
    speedup: float | None  # of computing in a training step
    bytes_per_image: int
    bytes: int | None = None
    encode_gpu_hours: float | None = None  # encoding and writing every image once
    saved_gpu_hours: float | None = None  # of training, over all epochs
    usd_per_month: float | None = None  # storage
    why: str = ""
    # Epochs from which on the cache costs less than encoding online, with STORED_MONTHS of storage; inf: never.
    break_even_epochs: float | None = None
    break_even_months: float | None = None  # of storage up to which it does in the run's epochs; 0: never


def feature_bytes(shape: ModelShape) -> int:
    """Size of one image in the cache, in bf16."""
    numbers = shape.stored_numbers
    return (shape.image_tokens * shape.feature_width if numbers is None else numbers) * FEATURE_BYTES


def advise(
    config: RunConfig, shape: ModelShape, layout: Layout, load: Workload, gpu: Gpu | None, prices: Prices | None
) -> CacheAdvice:
    """Resolve `features.cache: auto` to what pays; `on` and `off` stay, with what the numbers say about them.

    All images of an epoch are taken as different; repeated ones make the cache better than estimated. If the number of
    images is not known, or without GPUs, one image decides. Without `prices`, storage costs nothing.
    """
    size = feature_bytes(shape)
    if shape.trains_tower:
        why = "the tower is trained, so what it outputs changes"
        return CacheAdvice("off", None, None, size, why=why)
    if config.features.cache == "auto" and not config.model.caches_if_auto:
        return CacheAdvice("off", None, None, size, why="of family hf only features.cache: on stores features")
    images = None if load.images_per_epoch is None else round(load.images_per_epoch * min(1.0, load.passes))
    usd_per_gb_month = prices.storage(config.gcp.location).usd_per_gb_month if prices else None
    monthly = None
    if images is not None and usd_per_gb_month is not None:
        monthly = images * size / GIB * usd_per_gb_month
    total = None if images is None else images * size
    speedup, per_image = _per_image(config, shape, layout, load, gpu)
    if not load.images_per_sequence:
        return CacheAdvice("off", False, 1.0, size, 0, 0.0, 0.0, 0.0, "sequences have no images")
    if per_image is None:  # on CPUs, where no time is known, the tower's passes decide
        pays, why = False, "one epoch shows each image about once, so encoding it before saves nothing"
        if load.passes > 1:
            pays, why = True, f"the tower runs once per image instead of {load.passes:g} times"
        return CacheAdvice(_state(config, pays), pays, speedup, size, total, None, None, monthly, why)

    saved_s, encode_s = per_image[0] * load.passes, per_image[1]
    spent_s, epochs, months = encode_s, None, None
    price_per_gpu_s = _usd_per_gpu_second(config, prices) if prices else None
    weighed = ""
    if price_per_gpu_s is not None and usd_per_gb_month is not None:
        month_s = size / GIB * usd_per_gb_month / price_per_gpu_s
        spent_s += month_s * STORED_MONTHS
        epochs = spent_s / per_image[0] if per_image[0] > 0 else math.inf
        months = max(0.0, saved_s - encode_s) / month_s
        weighed = f" and {STORED_MONTHS} month of storage"
    pays = saved_s > spent_s
    why = (
        f"in {load.passes:.3g} epoch{'' if load.passes == 1 else 's'} it saves {1000 * saved_s:.2g} ms of GPU time per "
        f"image, computing is {speedup:.2f} times as fast; encoding once{weighed} takes {1000 * spent_s:.2g} ms"
    )
    if total is not None and total >= LARGE_BYTES:
        why += f"; {_large(images or 0, total, monthly, epochs, months)}"
    if prices and not weighed:
        why += "; storage is not weighed, as a price is missing"
    return CacheAdvice(
        state=_state(config, pays),
        pays=pays,
        speedup=speedup,
        bytes_per_image=size,
        bytes=total,
        encode_gpu_hours=None if images is None else images * encode_s / 3600,
        saved_gpu_hours=None
        if images is None
        else load.images_per_sequence * (load.sequences_per_epoch or 0) * saved_s / 3600,
        usd_per_month=monthly,
        break_even_epochs=epochs,
        break_even_months=months,
        why=why,
    )


def _large(images: int, total: int, monthly: float | None, epochs: float | None, months: float | None) -> str:
    """Time of a large store, and when encoding online is cheaper."""
    costs = "" if monthly is None else f" and cost ${monthly:,.0f} a month"
    text = f"features of {images / 1e6:,.3g} million images are {total / 1e12:,.1f} TB{costs}"
    if epochs is None or months is None:
        return text
    if math.isinf(epochs):
        return f"{text}: encoding online is always cheaper"
    stored = f"{STORED_MONTHS} month{'' if STORED_MONTHS == 1 else 's'}"
    return (
        f"{text}: encoding online is cheaper below {epochs:,.3g} epochs (features stored for {stored}), and in this "
        + (f"run's epochs if they are stored for more than {months:,.3g} months" if months else "run's epochs always")
    )


def _per_image(
    config: RunConfig, shape: ModelShape, layout: Layout, load: Workload, gpu: Gpu | None
) -> tuple[float, tuple[float, float] | None]:
    """Speedup of computing; an image's seconds of GPU time saved in an epoch, and those of encoding.

    Seconds of the encoding job's own GPU (cluster.features_machine) count as training's, which cost at least as much.
    """
    online, cached = (sequence_flops(config, shape, load, cached=value) for value in (False, True))
    if gpu is None or not load.images_per_sequence:
        return online.total / cached.total, None
    rates, _ = reached(config, shape, layout, gpu, cached=False)
    online_s, cached_s = (
        compute_seconds(
            flops,
            moved_bytes(config, shape, load, flops, rates, cached=without_tower),
            config,
            shape,
            layout,
            rates,
        )
        for flops, without_tower in ((online, False), (cached, True))
    )
    gpus = layout.world_size // layout.data_parallel  # that compute a sequence together
    write_s = feature_bytes(shape) / SAVE_BYTES_PER_S * layout.ranks_per_node
    if machine := config.cluster.features_machine:
        if (encoder := load_catalog().gpus.get(machine.accelerator_type)) is None:
            return online_s / cached_s, None
        rates, _ = reached(config, shape, layout, encoder, cached=False)
    encoding = config.cluster.of_job("cache_features")
    prepare_s = 0.0  # of a machine that the catalogue does not have, cores are not known
    if known := load_catalog().machines.get(encoding.machine_type):
        cores, ranks = known.vcpus, encoding.processes
        setting = config.data.loader_threads
        threads = threads_of(cores, ranks) if setting == "auto" else setting  # nothing waits there that adds more
        prepare_s = rank_preparation_s(config.model.image_kind, shape, threads, cores=cores, ranks=ranks)
    encode_s = max(tower_flops_per_image(shape, config.model.feature_layer) / rates.beside, write_s, prepare_s)
    return online_s / cached_s, ((online_s - cached_s) * gpus / load.images_per_sequence, encode_s)


def _state(config: RunConfig, pays: bool) -> Literal["on", "off"]:
    if config.features.cache != "auto":
        return config.features.cache
    return "on" if pays else "off"


def _usd_per_gpu_second(config: RunConfig, prices: Prices) -> float | None:
    cluster = config.cluster
    gpus = (cluster.accelerator_type, cluster.accelerator_count)
    quote = prices.machine(cluster.machine_type, *gpus, config.gcp.location, cluster.scheduling_strategy)
    return None if quote.usd_per_hour is None else quote.usd_per_hour / cluster.accelerator_count / 3600
