"""How an exported model is spread over several GPUs of one machine to answer questions: its language layers, in order.

Everything else, such as tower, embedding and head, stays on the first device. Program and planner share this rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WEIGHTS_SHARE = 0.7  # of a device's memory that weights may take before another device is used; assumed
MAX_WEIGHTS_SHARE = 0.95  # beyond it no question can be asked


def devices_needed(weight_bytes: int, device_bytes: int, available: int) -> int:
    """How many of the available devices hold the weights: as few as leave room for questions."""
    return min(available, max(1, math.ceil(weight_bytes / (WEIGHTS_SHARE * device_bytes))))


def devices_of_layers(outside_bytes: int, layer_bytes: Sequence[int], devices: int) -> list[int]:
    """The device of each language layer, in order: equal shares of all bytes, the first with what is outside of layers.

    A layer goes to the device in whose share its middle lies.
    """
    total = outside_bytes + sum(layer_bytes)
    if not layer_bytes or devices == 1 or not total:
        return [0] * len(layer_bytes)
    places, before = [], float(outside_bytes)
    for size in layer_bytes:
        places.append(min(devices - 1, int((before + size / 2) * devices / total)))
        before += size
    return places


def fullest_device(outside_bytes: int, layer_bytes: Sequence[int], devices: int) -> tuple[int, int]:
    """Bytes of weights on the fullest device, and how many layers lie on the device with most of them."""
    places = devices_of_layers(outside_bytes, layer_bytes, devices)
    held, counts = [outside_bytes, *([0] * (devices - 1))], [0] * devices
    for place, size in zip(places, layer_bytes, strict=True):
        held[place] += size
        counts[place] += 1
    return max(held), max(counts)
