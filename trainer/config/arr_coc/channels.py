"""Names of the texture channels that relevance sees, and presets of them."""

from __future__ import annotations

from collections.abc import Iterable

RGB = ("red", "green", "blue")
LAB = ("lightness", "lab_a", "lab_b")
EDGES = ("sobel_x", "sobel_y", "sobel_magnitude")
POSITION = ("position_x", "position_y", "eccentricity")
# In published lists of 13 channels under names of their own: saliency is sobel_magnitude, luminance is lightness.
DUPLICATES = ("saliency", "luminance")
HSV = ("hue", "saturation", "value")
STATISTICS = ("entropy", "contrast", "edge_density", "laplacian", "distinctness")

CHANNELS = (*RGB, *LAB, *EDGES, *POSITION, *DUPLICATES, *HSV, *STATISTICS)  # the order in which they are stored
ARR13_UNIQUE = (*RGB, "lightness", "lab_a", *EDGES, *POSITION)
PRESETS: dict[str, tuple[str, ...]] = {
    "arr13": (*ARR13_UNIQUE, *DUPLICATES),
    "arr13_unique": ARR13_UNIQUE,
    "rgb": RGB,
    "rgb_lab": (*RGB, *LAB),
    "all": CHANNELS,
}


def expand_channels(names: Iterable[str]) -> tuple[str, ...]:
    """Channels of these names and presets, each once, in the order of CHANNELS."""
    requested = {channel for name in names for channel in PRESETS.get(name, (name,))}
    return tuple(channel for channel in CHANNELS if channel in requested)
