"""A special file in place of any file of a run stops no command that looks at the run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.reports import make_run
from tests.support.short_form import chosen
from tests.support.special_files import INSTEAD
from vlmpipe.platforms.local.control import follow_logs, read_logs
from vlmpipe.report.build import write_report
from vlmpipe.runs.folders.diagnose import diagnose_folder
from vlmpipe.runs.folders.lock import is_running, lock_owner
from vlmpipe.runs.folders.marker import MARKER, all_markers
from vlmpipe.runs.folders.state import read_state
from vlmpipe.runs.folders.summary import report_of
from vlmpipe.runs.stack_dumps import read_stall
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

LOGS = ("pipeline.log", "logs/train/workerpool0-0.log", "logs/stacks/rank-0.txt", "run.lock")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("original"))
    marker = {"run_id": run.name, "config_digest": "", "arguments": ["digits.yaml"], "started_s": time.time()}
    write_record(LocalStorage(run), MARKER, {**marker, "ended_s": 0.0, "exit_code": 1, "version": 1})
    for name in LOGS:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("1 0.0\n")
    return run


LOOKS: dict[str, Callable[[Path], object]] = {
    "state": lambda run: read_state(run, now_s=time.time()),
    "runs": lambda run: all_markers(run.parent),
    "lock": lambda run: (is_running(run), lock_owner(run)),
    "report of the run": lambda run: report_of(run),
    "diagnosis": lambda run: diagnose_folder(run),
    "stacks": lambda run: read_stall(run, world_size=1),
    "logs": lambda run: list(read_logs(sorted(run.glob("logs/*/*.log")), last=3)),
    "following logs": lambda run: list(follow_logs(run, [run / "pipeline.log"], last=3)),
    "report": lambda run: write_report(str(run)),
}


# A report of each file that is no file takes the longest, and reads by the same functions as all others.
SHORT = chosen(
    {f"{look}, {kind}": (look, kind) for look in LOOKS for kind in INSTEAD},
    lambda name: not name.startswith("report, ") or name == "report, FIFO",
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("look", "kind"), SHORT.values(), ids=SHORT)
def test_no_command_waits_or_breaks(original: Path, tmp_path: Path, look: str, kind: str) -> None:
    run = shutil.copytree(original, tmp_path / original.name)
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        INSTEAD[kind](path)
        try:
            LOOKS[look](run)
        except UserError as error:
            assert error.code >= 64
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(whole)
