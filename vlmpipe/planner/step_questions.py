"""How many questions a step holds where samples share the prefix of their images (`data.share_prefix`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import layout_of

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.sampler import EpochTotals
    from vlmpipe.trainer.data.shards.index import SplitIndex

MANY = 1.5  # times the questions of separate samples: at fewer the nearest size may be the present one
UNKNOWN = (
    "data.share_prefix: a step of the same train.global_batch_size holds more questions or pairs than without it; how "
    "many is known once the data is prepared (vlmpipe data inspect RUN_FILE --prepare)."
)


@dataclass(frozen=True)
class StepQuestions:
    """Samples of a mean step. separate: of one without shared prefixes and the same number of sequences. unit: what
    a sample is called."""

    questions: float
    separate: float
    label_tokens: float
    global_batch_size: int  # sequences that hold about as many samples as separate ones; a multiple that the ranks take
    unit: str = "questions"

    def text(self, now: int) -> str:
        """A sentence for people. now: `train.global_batch_size`."""
        sentence = (
            f"data.share_prefix: a step of {now:,} sequences holds {self.questions:,.0f} {self.unit} with "
            f"{self.label_tokens:,.0f} label tokens, {self.separate:,.0f} {self.unit} without it"
        )
        if self.global_batch_size == now:
            many = self.questions > MANY * self.separate  # then the ranks take no fewer sequences than these
            return f"{sentence}; fewer sequences do not divide among the ranks." if many else f"{sentence}."
        questions = self.questions / now * self.global_batch_size
        return f"{sentence}. train.global_batch_size={self.global_batch_size} holds {questions:,.0f}."


def step_questions(config: RunConfig, job: JobConfig, split: SplitIndex, epoch: EpochTotals) -> StepQuestions | None:
    """Return what a step holds, from the first epoch as it is and without shared prefixes; None without these."""
    if job.data.share_prefix != "on":
        return None
    from vlmpipe.trainer.data.sampler import PackedBatchSampler

    alone = job.model_copy(update={"data": job.data.model_copy(update={"share_prefix": "off"})})
    separate = PackedBatchSampler.of_training(split, alone).totals(0)
    size, by = job.train.global_batch_size, layout_of(config).data_parallel * job.train.micro_batch_size
    questions, before = (size * totals.samples / totals.sequences for totals in (epoch, separate))
    sequences = min(size, max(by, by * round(size * before / questions / by)))
    unit = "pairs" if job.train.in_pairs else "questions"
    return StepQuestions(questions, before, size * epoch.label_tokens / epoch.sequences, sequences, unit)
