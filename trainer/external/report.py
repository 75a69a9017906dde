"""Metrics, progress and summary of a training program, in the files that a run of our own trainer has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence

from vlmpipe.trainer.checkpoint.attempts import Attempts, begun_by, read_attempts
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.external.base_model import model_section_sha256
from vlmpipe.trainer.external.checkpoints.states import newest_result, results_of
from vlmpipe.trainer.external.follow import TrainingProgress
from vlmpipe.trainer.external.process import Node
from vlmpipe.trainer.external.progress_endpoint import Posted
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.monitoring.usage import UsageLog
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.outage import patiently

STEP = "train"
LATER_FIELDS = {"warmup_steps"}  # of train, null by default


def settings_sha256(job: JobConfig) -> str:
    """Digest of all that decides the result: a finished run is trained again when it changes.

    A field that came later, at its default, leaves the digests of runs before as they were.
    """
    without = {"resume", "keep_checkpoints", "log_every_steps", "checkpoint_every_steps"}
    train = job.train.model_dump(mode="json", exclude=without)
    train = {name: value for name, value in train.items() if value is not None or name not in LATER_FIELDS}
    data = job.data.model_dump(mode="json", exclude={"loader_threads"})
    content = [train, data, model_section_sha256(job), job.pointers().prepared_uri]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_done(job: JobConfig) -> bool:
    """Return whether an earlier start of this very training has left a result that verifies."""
    store = open_storage(job.run.run_uri)
    begun = begun_by(read_attempts(results_of(job.run.run_uri)), job.run.submission_name)
    if (job.train.resume == "never" and not begun) or (summary := Summary.read_if_there(store)) is None:
        return False
    if summary.settings_sha256 != settings_sha256(job) or not summary.result:
        return False
    with contextlib.suppress(UserError):  # none verifies: train again
        _, result, _ = newest_result(job)
        return result is not None and result.name == summary.result
    return False


class TrainerReport:
    """Writes metrics.jsonl, the step's record and summary.json. On the chief only."""

    def __init__(
        self, job: JobConfig, node: Node, start: Attempts, *, first_step: int, versions: Mapping[str, str]
    ) -> None:
        self._job, self._node, self._first_step, self._versions = job, node, first_step, versions
        # The program writes TensorBoard's files itself; ours would cost the launcher an import of torch.
        self._log = MetricsLog(job.run.run_uri, resumed_from_step=first_step, warn=self._warn)
        self._progress = Progress(job.run.run_uri, STEP, patience_s=job.checkpoint.max_s_without_commit)
        store = open_storage(job.run.run_uri)
        self._usage = UsageLog(store, start.attempt, first_step=first_step, since=start.fresh_from)
        self._last_s = time.perf_counter()
        self._last_step = first_step
        if first_step:
            print(f"train: continuing after step {first_step}", flush=True)

    @classmethod
    def reuse(cls, job: JobConfig) -> None:
        """Close the step of a training that is done."""
        steps = Summary.read(open_storage(job.run.run_uri)).steps
        made = f"all {steps} steps were made before" if steps else "it was made before; no step was reported"
        Progress(job.run.run_uri, STEP).finish("reused", made)

    def log(self, progress: TrainingProgress, posted: Posted | None = None, *, last: bool = False) -> None:
        """Log lines that the program has written since the last call; show what it has posted where that is further.

        last: it has ended.
        """
        now = time.perf_counter()
        lines = [line for line in progress.read(last=last) if line["step"] > self._last_step]
        for line in lines:
            step_s = (now - self._last_s) / (lines[-1]["step"] - self._last_step)  # they came together
            values = {name: value for name, value in line.items() if name != "step"}
            self._log.write(int(line["step"]), {**values, "step_s": step_s, "time_s": time.time()})
        if lines:
            self._last_step, self._last_s = int(lines[-1]["step"]), now
            self._show(progress.step, progress.total_steps, lines[-1]["loss"])
        elif posted and posted.step > self._progress.record.done:
            self._show(posted.step, posted.total_steps, posted.loss)
        self._usage.note(max(self._first_step, progress.step))

    def _show(self, step: int, total_steps: int, loss: float | None) -> None:
        if loss is None:
            self._progress.update(step, total_steps, unit="steps")
        else:
            self._progress.update(step, total_steps, unit="steps", message=f"loss {loss:.4f}", loss=loss)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Close the step's record when the block raises."""
        try:
            yield
        except UserError as error:
            self._log.flush()
            self._usage.flush()
            self._progress.finish("failed", error.found.splitlines()[0][:300])
            raise

    def note(self, warnings: Sequence[str]) -> None:
        """Add warnings, printed already, to the step's record."""
        if warnings:
            self._progress.record.detail.setdefault("notes", []).extend(warnings)

    def _warn(self, text: str) -> None:
        print_warning(text)
        self.note([text])

    def stopped(self, progress: TrainingProgress, newest_step: int) -> None:
        self._log.close()
        self._usage.flush()
        what = f"a checkpoint of step {newest_step} is saved" if newest_step else "it left no checkpoint"
        self._progress.finish("stopped", f"stopped on request after step {progress.step}; {what}")

    def done(self, progress: TrainingProgress, steps: int, result: str) -> None:
        job, trainer = self._job, self._job.train.trainer
        assert trainer
        if not progress.step:
            self._warn(
                f"{trainer.name} reported no step and no loss: how far it trained is not known. It reports by lines of "
                "VLMPIPE_METRICS, trainer_state.json or TensorBoard's files"
            )
        summary = Summary(
            steps=progress.step or None,  # unknown, which no other number stands for
            total_steps=steps or progress.step or None,
            first_loss=self._first_loss(progress),
            final_loss=progress.loss,
            world_size=self._node.world_size,
            nodes=self._node.cluster.num_nodes,
            strategy=f"{trainer.name} ({trainer.launch})",
            resumed_from_step=self._first_step or None,
            initial_weights=job.model.origins(),
            trainer=trainer.name,
            result=result,
            checkpoint=result,
            settings_sha256=settings_sha256(job),
            versions=self._versions,
        )

        def store() -> None:
            self._log.store()
            usage = self._usage.close()
            summary.model_copy(
                update={
                    "starts": usage.starts,
                    "steps_made": usage.steps_made,
                    "steps_repeated": usage.steps_repeated,
                    "wall_s": usage.seconds,
                }
            ).write(open_storage(job.run.run_uri))

        patiently("writing metrics and summary", store, limit_s=job.checkpoint.max_s_without_commit)
        self._log.close()
        at_loss = "" if progress.loss is None else f"loss {progress.loss:.4f} "
        made = f"after {progress.step} steps" if progress.step else "no step was reported"
        self._progress.finish(message=f"{at_loss}{made} of {trainer.name}")

    def _first_loss(self, progress: TrainingProgress) -> float | None:
        lines = self._log.lines()
        return lines[0]["loss"] if lines else progress.first_loss
