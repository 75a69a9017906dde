"""Texture channels of an image on the grid of its visual tokens.

Channels of a pixel are averaged over a token's cell; hue, saturation and value are those of the cell's mean colour,
because hues are angles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

TEXTURES_VERSION = 1  # part of cached features' key: raise it when a channel changes
BAND_PIXELS = 50_000  # whose colours are converted at once
GREY_LEVELS = 16  # of the histogram in a cell
EDGE = 0.1  # gradient magnitude above which a pixel is on an edge
# sRGB to CIE XYZ (IEC 61966-2-1), and the D65 white point of the 2 degree observer.
TO_XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.95047, 1.0, 1.08883)
LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709
# L*, a* and b* from the compressed X, Y and Z of `compressed_xyz`, all divided by 100.
TO_LAB, LAB_OFFSET = ((0.0, 1.16, 0.0), (5.0, -5.0, 0.0), (0.0, 2.0, -2.0)), (-0.16, 0.0, 0.0)


def textures_of(image: Tensor, side: int) -> Tensor:
    """All channels of one image, (rows x columns, channels) in fp32 and of about unit size, tokens in raster order.

    image: (3, height, width), sRGB in [0, 1]; height and width are multiples of `side`, pixels of a token's cell.
    """
    image = image.float().contiguous()
    rows, columns = image.shape[1] // side, image.shape[2] // side
    grey = torch.einsum("c,chw->hw", image.new_tensor(LUMA), image)
    sobel_x, sobel_y, laplacian = _filtered(grey)
    magnitude = torch.sqrt((sobel_x**2 + sobel_y**2) / 2)
    colour = _means(image, side)
    lab = _to_lab(_compressed_means(image, side))  # of the means: the last step to L*a*b* is linear
    edges = (sobel_x, sobel_y, magnitude, (magnitude > EDGE).float(), laplacian.abs_())
    red, green, blue, lightness, lab_a, lab_b = *colour, *lab
    sobel_x, sobel_y, magnitude, density, laplacian = (_means(plane[None], side)[0] for plane in edges)
    y, x = torch.meshgrid(_centred(rows, image), _centred(columns, image), indexing="ij")
    cells = _cells(grey, side)  # (rows, columns, pixels)
    spread = lab - lab.mean((1, 2))[:, None, None]  # from the image's mean colour
    hue, saturation, value = hsv_of(colour)
    named = {
        "red": red,
        "green": green,
        "blue": blue,
        "lightness": lightness,
        "lab_a": lab_a,
        "lab_b": lab_b,
        "sobel_x": sobel_x,
        "sobel_y": sobel_y,
        "sobel_magnitude": magnitude,
        "position_x": x,
        "position_y": y,
        "eccentricity": torch.sqrt((x**2 + y**2) / 2),
        "saliency": magnitude,
        "luminance": lightness,
        "hue": hue,
        "saturation": saturation,
        "value": value,
        "entropy": _entropy(cells),
        "contrast": _deviation(cells),
        "edge_density": density,
        "laplacian": laplacian,
        "distinctness": torch.linalg.vector_norm(spread, dim=0),
    }
    return torch.stack([named[name] for name in CHANNELS], dim=-1).flatten(0, 1)


def image_of(patches: Tensor, grid: tuple[int, int, int], processor: BaseImageProcessor) -> Tensor:
    """The image that an image processor of the Qwen-VL families cut: (3, height, width) in [0, 1].

    patches: (rows x columns, 3 x frames x side x side), normalised, those of a token side by side. grid: frames of the
    grid, rows and columns of patches.
    """
    (_, rows, columns), merge, side = grid, int(processor.merge_size), int(processor.patch_size)
    cut = patches.float().view(rows // merge, columns // merge, merge, merge, 3, -1, side, side)[..., 0, :, :]
    image = cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)
    mean, std = (image.new_tensor(processor.to_dict()[name])[:, None, None] for name in ("image_mean", "image_std"))
    return (image * std + mean).clamp(0, 1)


def lab_of(image: Tensor) -> Tensor:
    """CIE L*a*b* of sRGB, (3, ...), divided by 100."""
    return _to_lab(compressed_xyz(image))


def compressed_xyz(image: Tensor) -> Tensor:
    """CIE XYZ of sRGB, (3, ...), relative to white and compressed as L*a*b* does: cube roots, but for the darkest.

    Powers are taken by exp2 and log2, in half the time of torch's pow.
    """
    # Each curve is a power above a knee and a line below: the sum of both, each held at the knee on the other's side.
    flat, knee, dark = image.reshape(3, -1), 0.04045, (6 / 29) ** 3
    power = _power((flat.clamp(min=knee) + 0.055).div_(1.055), 2.4)
    linear = power.add_(flat.clamp(max=knee).sub_(knee), alpha=1 / 12.92)
    scaled = (image.new_tensor(TO_XYZ) / image.new_tensor(WHITE)[:, None]) @ linear
    roots = _power(scaled.clamp(min=dark), 1 / 3)
    return roots.add_(scaled.clamp_(max=dark).sub_(dark), alpha=(29 / 6) ** 2 / 3).view(image.shape)


def _power(base: Tensor, exponent: float) -> Tensor:
    """Return `base` to the power of `exponent`, for positive numbers."""
    return torch.log2(base).mul_(exponent).exp2_()


def _to_lab(compressed: Tensor) -> Tensor:
    offset = compressed.new_tensor(LAB_OFFSET).view(3, *[1] * (compressed.ndim - 1))
    return torch.einsum("lx,x...->l...", compressed.new_tensor(TO_LAB), compressed) + offset


def hsv_of(image: Tensor) -> Tensor:
    """Hue, saturation and value of RGB, (3, ...), all in [0, 1]; hue and saturation of black and grey are 0."""
    red, green, blue = image
    value, spread = image.amax(0), image.amax(0) - image.amin(0)
    divisor = spread.clamp(min=1e-12)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor % 6,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    is_grey = spread <= 1e-12
    zero = torch.zeros_like(value)
    hue = torch.where(is_grey, zero, sixths / 6)
    return torch.stack([hue, torch.where(is_grey, zero, spread / value.clamp(min=1e-12)), value])


def _filtered(grey: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sobel across columns, across rows, and Laplacian of (height, width), with edges repeated."""
    padded = F.pad(grey[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    across, down = padded[:, 2:] - padded[:, :-2], padded[2:] - padded[:-2]
    sobel_x = (across[:-2] + 2 * across[1:-1] + across[2:]) / 4
    sobel_y = (down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]) / 4
    around = padded[1:-1, :-2] + padded[1:-1, 2:] + padded[:-2, 1:-1] + padded[2:, 1:-1]
    return sobel_x, sobel_y, around - 4 * grey


def _means(planes: Tensor, side: int) -> Tensor:
    """(planes, height, width) -> (planes, rows, columns)"""
    count, height, width = planes.shape
    return planes.view(count, height // side, side, width // side, side).mean((2, 4))


def _centred(count: int, like: Tensor) -> Tensor:
    """Centres of cells, from -1 to 1 over the image."""
    return (torch.arange(count, device=like.device, dtype=like.dtype) * 2 + 1) / count - 1


def _cells(grey: Tensor, side: int) -> Tensor:
    """(rows, columns, pixels of a cell)"""
    rows, columns = grey.shape[0] // side, grey.shape[1] // side
    return grey.view(rows, side, columns, side).transpose(1, 2).flatten(2)


def _compressed_means(image: Tensor, side: int) -> Tensor:
    """`compressed_xyz` averaged over cells, a band of rows at a time.

    Temporaries of a band stay in the processor's cache, and the allocator keeps them, where those of a whole image are
    mapped again each time.
    """
    rows = max(1, BAND_PIXELS // (side * image.shape[2]))
    return torch.cat([_means(compressed_xyz(band), side) for band in image.split(rows * side, dim=1)], dim=1)


def _deviation(cells: Tensor) -> Tensor:
    """Standard deviation of each cell. torch's own takes three times as long."""
    return (cells - cells.mean(-1, keepdim=True)).square_().mean(-1).sqrt_()


def _entropy(cells: Tensor) -> Tensor:
    """Return the entropy of each cell's grey levels over its maximum: (rows, columns, pixels) -> (rows, columns)."""
    levels = (cells * GREY_LEVELS).long().clamp(0, GREY_LEVELS - 1)
    counts = torch.zeros(*cells.shape[:2], GREY_LEVELS, device=cells.device)
    shares = counts.scatter_add_(2, levels, torch.ones_like(cells)) / cells.shape[2]
    return torch.special.entr(shares).sum(-1) / math.log(GREY_LEVELS)
