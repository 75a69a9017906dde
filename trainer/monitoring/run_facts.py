"""Facts of a run as a whole, for metrics and summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.trainer.records.commit import CommitRecord

if TYPE_CHECKING:
    from vlmpipe.trainer.config.compiling import CompileChoice
    from vlmpipe.trainer.monitoring.rank_metrics import ForwardTimer
    from vlmpipe.trainer.sizing.model_shape import ModelShape
    from vlmpipe.trainer.strategies.base import Strategy


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that hold from its first to its last step."""

    strategy: Strategy
    record: CommitRecord  # of a checkpoint at step 0
    total_steps: int
    num_parameters: int
    num_trainable: int
    features: str  # cached | online
    shape: ModelShape
    compiling: CompileChoice
    forward_timer: ForwardTimer | None  # None with nothing to time
