"""The loss of a training module, a module of its own so that it can be computed in parts from outside."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class TokenLoss(nn.Module):
    """Summed cross-entropy of label tokens, a scalar in fp32."""

    def forward(self, logits: Tensor, label_ids: Tensor) -> Tensor:
        """logits: (labels, vocabulary). label_ids: (labels,)."""
        return F.cross_entropy(logits.float(), label_ids, reduction="sum")
