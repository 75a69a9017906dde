"""Digests of weights: whether two models hold the same numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of every weight, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
