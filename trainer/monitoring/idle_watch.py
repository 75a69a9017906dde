"""Says when training waits for data, or its GPUs idle for another reason, and what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.models.image_threads import max_useful_threads, num_threads

MAX_WAIT_SHARE = 0.1  # of the time: below it, other causes cost more
MIN_UTILIZATION = 60.0  # percent of a sample period in which a kernel ran, mean of the GPUs
MAX_STALL_SHARE = 0.1  # of the time in checkpoints, which explains idle GPUs
LINES = 3  # in a row: one slow line is a pause


@dataclass(frozen=True)
class Threads:
    """Threads of a rank that prepare images: now, and the most that its cores have use for."""

    now: int
    most: int

    @classmethod
    def of_this_process(cls) -> Threads:
        return cls(num_threads(), max_useful_threads())


class IdleWatch:
    """Warns once for each time that waiting, or idling, begins and lasts for `LINES` lines of metrics."""

    def __init__(
        self,
        job: JobConfig,
        *,
        cached: bool,
        compiles: bool,
        threads: Callable[[], Threads] = Threads.of_this_process,
    ) -> None:
        self._job, self._cached, self._compiles, self._threads = job, cached, compiles, threads
        self._lines = {"data": 0, "gpu": 0}

    def note(self, wait_share: float, stall_share: float, utilization: float | None) -> list[str]:
        """Warnings for a line of metrics.

        Args:
            wait_share: of the line's time in which the slowest rank waited for data; stall_share: in checkpoints.
            utilization: mean of the GPUs in percent; None without GPUs or gauges.
        """
        waits = wait_share > MAX_WAIT_SHARE
        idles = utilization is not None and utilization < MIN_UTILIZATION and not waits
        idles = idles and stall_share <= MAX_STALL_SHARE
        warnings = []
        if self._lasts("data", waits):
            warnings.append(f"{wait_share:.0%} of the time training waits for data: {self._remedy()}")
        if self._lasts("gpu", idles):
            more = "" if self._compiles else "train.compile=on, or "
            warnings.append(
                f"a kernel runs on the GPUs in {utilization:.0f} % of the time only, and data is not why: {more}a "
                "larger train.micro_batch_size gives them longer kernels (vlmpipe plan says what fits)"
            )
        return warnings

    def _lasts(self, what: str, is_so: bool) -> bool:
        self._lines[what] = self._lines[what] + 1 if is_so else 0
        return self._lines[what] == LINES

    def _remedy(self) -> str:
        if self._cached:
            return "features are read too slowly; raise data.shard_cache_gib, or take a faster disk"
        threads = self._threads()
        takes_more = self._job.data.loader_threads == "auto"  # where this rank has few, another may be the slowest
        if threads.now < threads.most and not takes_more:
            return (
                f"raise data.loader_threads from {threads.now} to {threads.most}, for which each rank has cores, or "
                "set it to auto"
            )
        cache = "features.cache=on encodes each image once; or " if "tower" in self._job.model.frozen else ""
        cores = (
            "each rank that waits (data.loader_threads: auto) may take all its cores"
            if takes_more
            else f"each rank's {threads.most} threads (data.loader_threads) have all its cores"
        )
        return f"{cores}; {cache}take a machine with more vCPUs for each GPU, or smaller images"
