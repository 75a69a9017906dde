"""A run on this machine, as commands ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.platforms.base import LogLine

if TYPE_CHECKING:
    from vlmpipe.runs.diagnosis import Diagnosis
    from vlmpipe.runs.folders.summary import RunReport


@dataclass(frozen=True)
class RunHere:
    """A run's folder."""

    folder: Path

    asks = asks_for_logs = ""

    @property
    def argument(self) -> str:
        return self.folder.name

    def reader(self) -> Callable[[], RunReport]:
        from vlmpipe.runs.folders.summary import report_of

        return lambda: report_of(self.folder)

    def logs(self, *, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        from vlmpipe.platforms.local.control import follow_logs, log_files, read_logs

        files = log_files(self.folder, step)
        lines = (
            follow_logs(self.folder, files, step=step, last=last) if follow else read_logs(files, step=step, last=last)
        )
        for line in lines:
            prefix = f"[{line.process}] " if len(files) > 1 else ""
            yield LogLine(prefix + line.text, line.time, line.step, line.process, line.text)

    def cancel(self) -> bool:
        from vlmpipe.platforms.local.control import cancel
        from vlmpipe.runs.folders.summary import report_of

        return cancel(report_of(self.folder))

    def diagnose(self) -> Diagnosis:
        from vlmpipe.runs.folders.diagnose import diagnose_folder

        return diagnose_folder(self.folder)
