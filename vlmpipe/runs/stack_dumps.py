"""Parses the stacks that the watchdog dumps (`logs/stacks/rank-N.txt`): where ranks wait, and which one differs."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.storage.regular_files import NotRegularFileError, open_regular

FOLDER = "logs/stacks"
_FILE = re.compile(r"^rank-(\d+)\.txt$")
_MAIN = re.compile(r"^main thread: (0x[0-9a-f]+)$", re.MULTILINE)
_STEP = re.compile(r"^last step: (\d+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
SHOWN_PARTS = 3  # of a file's path


@dataclass(frozen=True)
class Frame:
    """One call. Two ranks are in the same call if function and file are equal: lines differ within a loop."""

    function: str
    file: str
    line: int

    @property
    def key(self) -> tuple[str, str]:
        return self.function, self.file

    def text(self) -> str:
        """For people: the function and the end of its path."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-SHOWN_PARTS:])}:{self.line})"


@dataclass(frozen=True)
class Stall:
    """The calls in which the ranks were. Frames go from the outermost call to the innermost."""

    last_step: int | None
    ranks: dict[int, tuple[Frame, ...]]
    silent: tuple[int, ...]  # ranks that left no stacks: stopped, killed, or on a machine that is gone

    @property
    def common(self) -> Frame | None:
        """The deepest call that all ranks with stacks are in."""
        deepest = None
        for frames in zip(*self.ranks.values(), strict=False):
            if len({frame.key for frame in frames}) > 1:
                break
            deepest = frames[0]
        return deepest

    @property
    def places(self) -> dict[Frame, list[int]]:
        """The innermost call of each rank, and the ranks that are in it."""
        ranks: dict[Frame, list[int]] = defaultdict(list)
        for rank, frames in sorted(self.ranks.items()):
            if frames:
                ranks[frames[-1]].append(rank)
        return dict(ranks)

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "last_step": self.last_step,
            "deepest_common_call": self.common.text() if self.common else None,
            "ranks": {str(rank): [frame.text() for frame in frames] for rank, frames in self.ranks.items()},
            "silent_ranks": list(self.silent),
        }

    def lines(self) -> list[str]:
        """For people: one line for each place, the ranks apart from most others last."""
        lines = [f"deepest common call: {self.common.text()}"] if self.common and len(self.ranks) > 1 else []
        for frame, ranks in sorted(self.places.items(), key=lambda place: -len(place[1])):
            lines.append(f"{_ranks(ranks)} in {frame.text()}")
        if self.silent:
            lines.append(f"{_ranks(self.silent)} left no stacks: stopped, killed, or its machine is gone")
        return lines


def read_stall(folder: Path, *, world_size: int, since_s: float = 0.0) -> Stall | None:
    """The stacks in a run's folder that were written after `since_s` (Unix seconds); None without any.

    Stacks of an earlier step than the last are left out: their rank was slow once, and went on. Ranks that stall
    together are at most one step apart, because each step has a collective.

    Args:
        world_size: ranks that there were, 0 when that is not known.
    """
    ranks: dict[int, tuple[Frame, ...]] = {}
    steps: dict[int, int] = {}
    for path in sorted((folder / FOLDER).glob("rank-*.txt")):
        name = _FILE.match(path.name)
        try:
            with open_regular(path) as file:
                written_s, text = os.fstat(file.fileno()).st_mtime, file.read().decode("utf-8", "replace")
        except (OSError, NotRegularFileError):
            continue
        if name and written_s >= since_s:
            rank, step = int(name[1]), _STEP.search(text)
            ranks[rank] = main_frames(text)
            if step:
                steps[rank] = int(step[1])
    if not ranks:
        return None
    newest = max(steps.values(), default=0)
    for rank in [rank for rank, step in steps.items() if step < newest - 1]:
        del ranks[rank], steps[rank]
    silent = tuple(rank for rank in range(world_size) if rank not in ranks)
    return Stall(min(steps.values(), default=None), ranks, silent)


def main_frames(text: str) -> tuple[Frame, ...]:
    """The main thread's calls, the outermost first; those of the file's last thread if no main thread is named."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[1:]
    main = _MAIN.search(text)
    chosen = [thread for thread in threads if main and f"hread {main[1]} " in thread.split("\n", 1)[0]] or threads[-1:]
    matches = [_FRAME.match(line) for thread in chosen for line in thread.splitlines()]
    frames = [Frame(match["function"], match["file"], int(match["line"])) for match in matches if match]
    return tuple(reversed(frames))


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
