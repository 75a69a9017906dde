"""The best validated step of a training, and whether training ends because nothing has been better for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.resume import Resumed
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.evaluation.validation_loss import LABEL_TOKENS, Validation
from vlmpipe.trainer.records.validations import Validations

WORDS = {"validation_loss": "validation loss", "validation_exact_match": "exact match of validation answers"}


class BestStep:
    """Counts the validations of a run. Given the same values, all ranks decide the same.

    `state` goes into each COMMIT, so that a resumed run decides as one that was not interrupted; None where the run
    takes no validation before its last step.
    """

    def __init__(
        self,
        job: JobConfig,
        validation: Validation | None,
        resumed: Resumed | None,
        is_committed: Callable[[str], bool],
    ) -> None:
        """is_committed: tells whether the checkpoint of a name is there. Collective."""
        self._metric, self._stopping = job.train.best_metric, job.train.early_stopping
        self._saves_best = job.checkpoint.export == "best"
        self.state: Validations | None = None
        self.notes: list[str] = []
        if not (job.train.validate_every_steps and validation):
            return
        tokens = validation.label_tokens
        self.state = Validations(self._metric, tokens)
        if resumed:
            record, name = resumed.checkpoint.record, resumed.checkpoint.name
            if (before := record.validations) is None:
                if self._stopping or self._saves_best:
                    self.notes = [
                        f"{name} records no validations: the best step is looked for from step {record.step} on"
                    ]
            elif before.of_same(self._metric, tokens):
                self.state = before.committed(name, record.step)
                if self._saves_best and self.state.best is not None:
                    self.state = self._exportable(before, name, record.step, is_committed)
            else:
                self.notes = [
                    f"the best step so far, {before.best_step} by {before.metric} on {before.label_tokens:,} label "
                    f"tokens, is forgotten: values of {self._metric} on {tokens:,} cannot be compared with it"
                ]

    def _exportable(
        self, before: Validations, name: str, step: int, is_committed: Callable[[str], bool]
    ) -> Validations:
        """The validations before the resume from checkpoint `name`, with a best step that can be exported.

        One without a checkpoint counts no more, which is noted: no later step would be saved that is not better than
        it. Patience goes by the values alone, and stays.
        """
        state = before.committed(name, step)
        if not is_committed(state.saved):
            state = replace(before, saved="", saved_value=None).committed(name, step)
        if state.saved_value == state.best:
            return state
        left = f"the best step is looked for from step {step} on"
        if state.saved:
            left = f"the best one that is there is {state.saved} ({state.saved_value:.4f})"
        self.notes.append(
            f"step {state.best_step}, whose {WORDS[self._metric]} is the best so far ({state.best:.4f}), has no "
            f"checkpoint: checkpoint.export was last then, or its save failed; {left}"
        )
        return replace(state, best=state.saved_value, best_step=step_of(state.saved) if state.saved else 0)

    def lacks(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a validation is due that gave no metrics yet, or others than are compared."""
        if self.state is None:
            return not metrics
        return self._metric not in metrics or metrics.get(LABEL_TOKENS) != self.state.label_tokens

    def count(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the validation after `step`."""
        if self.state:
            least = self._stopping.min_improvement if self._stopping else 0.0
            self.state = self.state.counted(step, metrics[self._metric], min_improvement=least)

    def committed(self, name: str) -> None:
        """Note the newest committed checkpoint; "" for none."""
        if self.state and name:
            self.state = self.state.committed(name, step_of(name))

    def is_worth_saving(self, step: int) -> bool:
        """Return whether the run exports its best step, and that is `step` so far."""
        return self._saves_best and self.state is not None and self.state.best_step == step > 0

    @property
    def ends_training(self) -> bool:
        """Return whether patience is at its end."""
        return bool(self._stopping and self.state and self.state.waited >= self._stopping.patience)

    @property
    def why_ended(self) -> str:
        """Why training ends early, a phrase; empty where it does not."""
        if not self.ends_training:
            return ""
        assert self.state and self._stopping
        by = f" by more than {self._stopping.min_improvement:g}" if self._stopping.min_improvement else ""
        text = f"{WORDS[self._metric]} is not better{by} in {self.state.waited} validations"
        if self.state.reference is None:
            return f"{text}, none of which was a finite number"
        return f"{text} since step {self.state.reference_step} ({self.state.reference:.4f})"

    def summary(self) -> dict[str, object]:
        """Fields of the run's summary; empty without validations."""
        state = self.state
        if state is None or (state.best is None and not self.ends_training):
            return {}
        return {
            "best_metric": self._metric,
            "best_step": state.best_step or None,
            "best_value": state.best,
            "best_checkpoint": state.saved,
            "ended_early": self.why_ended,
        }
