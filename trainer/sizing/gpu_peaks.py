"""Peak FLOP rates of GPUs, by device name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlmpipe.trainer.config.train_options import ComputeType

TERA = 1e12


@dataclass(frozen=True)
class Peaks:
    """Dense matrix products, in TFLOP/s; None without such units. Sources: the planner's machines.yaml."""

    bf16: float | None
    fp16: float | None
    fp32: float


# The first that occurs in the device's name counts.
PEAKS = {
    "GB200": Peaks(2500, 2500, 90),
    "B200": Peaks(2250, 2250, 80),
    "H200": Peaks(989.5, 989.5, 67),
    "H100": Peaks(989.5, 989.5, 67),
    "A100": Peaks(312, 312, 19.5),
    "RTX PRO 6000": Peaks(467.8, 467.8, 117),
    "L4": Peaks(121, 121, 30.3),
    "V100": Peaks(None, 125, 15.6),
    "P100": Peaks(None, 18.7, 10.6),
    "T4": Peaks(None, 65, 8.1),
    "P4": Peaks(None, None, 5.5),
}


def peak_of(name: str, compute_type: ComputeType) -> float | None:
    """Peak FLOP/s of the GPU with this device name; None for an unknown one."""
    peaks_of_gpu = next((peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
    peak = getattr(peaks_of_gpu, compute_type) if peaks_of_gpu else None
    return TERA * peak if peak else None
