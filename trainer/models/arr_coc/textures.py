"""Texture channels of an image on the grid of its visual tokens.

Channels of a pixel are averaged over a token's cell; hue, saturation and value are those of the cell's mean colour,
because hues are angles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.config.arr_coc.channels import CHANNELS

TEXTURES_VERSION = 1  # part of cached features' key: raise it when a channel changes
GREY_LEVELS = 16  # of the histogram in a cell
EDGE = 0.1  # gradient magnitude above which a pixel is on an edge
# sRGB to CIE XYZ (IEC 61966-2-1), and the D65 white point of the 2 degree observer.
TO_XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.95047, 1.0, 1.08883)
LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709
SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))  # across columns, without the factor of 1/4
LAPLACE = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def textures_of(image: Tensor, side: int) -> Tensor:
    """All channels of one image, (rows x columns, channels) in fp32 and of about unit size, tokens in raster order.

    image: (3, height, width), sRGB in [0, 1]; height and width are multiples of `side`, pixels of a token's cell.
    """
    image = image.float()
    rows, columns = image.shape[1] // side, image.shape[2] // side
    lab = lab_of(image)
    grey = torch.einsum("c,chw->hw", image.new_tensor(LUMA), image)
    sobel_x, sobel_y, laplacian = _filtered(grey)
    magnitude = torch.sqrt((sobel_x**2 + sobel_y**2) / 2)
    pixels = torch.stack([*image, *lab, sobel_x, sobel_y, magnitude, (magnitude > EDGE).float(), laplacian.abs()])
    means = F.avg_pool2d(pixels, side)  # (pixel channels, rows, columns)
    red, green, blue, lightness, lab_a, lab_b, sobel_x, sobel_y, magnitude, density, laplacian = means
    y, x = torch.meshgrid(_centred(rows, image), _centred(columns, image), indexing="ij")
    cells = _cells(grey, side)  # (rows, columns, pixels)
    spread = means[3:6] - lab.mean((1, 2))[:, None, None]  # from the image's mean colour
    hue, saturation, value = hsv_of(means[:3])
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
        "contrast": cells.std(-1, correction=0),
        "edge_density": density,
        "laplacian": laplacian,
        "distinctness": torch.linalg.vector_norm(spread, dim=0),
    }
    return torch.stack([named[name] for name in CHANNELS], dim=-1).flatten(0, 1)


def image_of(patches: Tensor, grid: tuple[int, int, int], processor: Any) -> Tensor:
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
    linear = torch.where(image > 0.04045, ((image + 0.055) / 1.055) ** 2.4, image / 12.92)
    xyz = torch.einsum("xc,c...->x...", image.new_tensor(TO_XYZ), linear)
    scaled = xyz / image.new_tensor(WHITE).view(3, *[1] * (image.ndim - 1))
    x, y, z = torch.where(scaled > (6 / 29) ** 3, scaled ** (1 / 3), scaled * (29 / 6) ** 2 / 3 + 4 / 29)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)]) / 100


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


def _filtered(grey: Tensor) -> Tensor:
    """Sobel across columns, across rows, and Laplacian of (height, width), with edges repeated."""
    sobel = grey.new_tensor(SOBEL) / 4
    kernels = torch.stack([sobel, sobel.T, grey.new_tensor(LAPLACE)])[:, None]
    return F.conv2d(F.pad(grey[None, None], (1, 1, 1, 1), mode="replicate"), kernels)[0]


def _centred(count: int, like: Tensor) -> Tensor:
    """Centres of cells, from -1 to 1 over the image."""
    return (torch.arange(count, device=like.device, dtype=like.dtype) * 2 + 1) / count - 1


def _cells(grey: Tensor, side: int) -> Tensor:
    """(rows, columns, pixels of a cell)"""
    rows, columns = grey.shape[0] // side, grey.shape[1] // side
    return grey.view(rows, side, columns, side).transpose(1, 2).flatten(2)


def _entropy(cells: Tensor) -> Tensor:
    """Of the grey levels in each cell, as a share of the most possible: (rows, columns, pixels) -> (rows, columns)"""
    levels = (cells * GREY_LEVELS).long().clamp(0, GREY_LEVELS - 1)
    counts = torch.zeros(*cells.shape[:2], GREY_LEVELS, device=cells.device)
    shares = counts.scatter_add_(2, levels, torch.ones_like(cells)) / cells.shape[2]
    return torch.special.entr(shares).sum(-1) / math.log(GREY_LEVELS)
