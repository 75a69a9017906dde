"""Training loss by data source: sums that stay on the device until metrics take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmpipe.trainer.config.job import JobConfig


class SourceLosses:
    """One rank's summed losses by source, and their numbers of terms (label tokens or pairs), since the last `take`.

    Ranks that hold one model replica may each add all of its terms: that changes sums and counts by the same factor,
    and no mean.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)

    @classmethod
    def of(cls, job: JobConfig, device: torch.device) -> SourceLosses | None:
        """Sums for the run's sources; None with a single one."""
        names = [source.name for source in job.data.sources]
        return cls(names, device) if names else None

    def add(self, losses: Tensor, sources: Tensor) -> None:
        """losses: (terms,); sources: (terms,), indexes into `names`. The host waits for nothing."""
        of_terms = losses.detach().double()
        self._sums.index_add_(1, sources, torch.stack([of_terms, torch.ones_like(of_terms)]))

    def take(self) -> Tensor:
        """(2 x names,): the sums, then the terms. Both begin again at 0."""
        taken = self._sums.flatten()
        self._sums = torch.zeros_like(self._sums)
        return taken
