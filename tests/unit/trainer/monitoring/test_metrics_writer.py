"""metrics.jsonl is written whatever becomes of TensorBoard's files."""

from __future__ import annotations

import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import MEMORY
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.monitoring import metrics_writer
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.monitoring.trackers import Tracker, open_tensorboard
from vlmpipe.trainer.records.metrics import FILE
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_lines, unseal


def tensorboard(folder: Path) -> list[Tracker]:
    opened = open_tensorboard(str(folder / "run"))
    return [opened] if opened else []


@pytest.mark.parametrize("writable", [True, False])
def test_unwritable_tensorboard_folder_is_a_warning(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mount").touch()
    folder = tmp_path / "logs" if writable else tmp_path / "mount" / "logs"
    monkeypatch.setenv("AIP_TENSORBOARD_LOG_DIR", str(folder))
    log = MetricsLog(str(tmp_path / "run"), resumed_from_step=0, trackers=tensorboard(tmp_path))
    log.write(1, {"loss": 2.5})
    log.close()
    assert unseal((tmp_path / "run" / FILE).read_bytes().rstrip()) == {"step": 1, "loss": 2.5}
    assert (folder.exists() and any(folder.iterdir())) == writable
    assert ("no TensorBoard files" in capsys.readouterr().err) == (not writable)


def test_tensorboard_has_every_number_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_TENSORBOARD_LOG_DIR", str(tmp_path / "logs"))
    log = MetricsLog(str(tmp_path / "run"), resumed_from_step=0, trackers=tensorboard(tmp_path))
    log.write(10, {"loss": 2.5, "label_tokens": 70})
    log.write(20, {"loss": 1.5, "label_tokens": 80})
    log.close()
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    curves = {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curves == {"train/loss": [(10, 2.5), (20, 1.5)], "train/label_tokens": [(10, 70), (20, 80)]}


class Recorded:
    """Stands in for W&B and records what it gets."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("word", "number"), [("active", 1), ("absent", 0)])
def test_words_in_the_log_become_numbers_elsewhere(
    word: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_TENSORBOARD_LOG_DIR", str(tmp_path / "logs"))
    recorded = Recorded()
    log = MetricsLog(str(tmp_path / "run"), resumed_from_step=0, trackers=[recorded, *tensorboard(tmp_path)])
    log.write(1, {"reduction_server": word})
    log.close()
    assert recorded.lines == [{"step": 1, "reduction_server": number}]
    assert unseal((tmp_path / "run" / FILE).read_bytes().rstrip()) == {"step": 1, "reduction_server": word}
    (events,) = (tmp_path / "logs").iterdir()
    assert b"train/reduction_server" in events.read_bytes()


def test_what_is_measured_later_joins_the_newest_line_and_is_tracked_once(tmp_path: Path) -> None:
    recorded = Recorded()
    log = MetricsLog(str(tmp_path), resumed_from_step=0, trackers=[recorded])
    assert log.line_of(1) is None
    log.write(1, {"loss": 2.0})
    log.write(2, {"loss": 1.0})
    log.amend(2, {"validation_loss": 3.0})
    log.close()
    assert log.lines() == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "validation_loss": 3.0}]
    assert [unseal(line) for line in (tmp_path / FILE).read_bytes().splitlines()] == log.lines()
    assert recorded.lines[2:] == [{"step": 2, "validation_loss": 3.0}]
    assert log.line_of(2) == log.lines()[-1] and log.line_of(1) is None


class Away(LocalStorage):
    """A folder that takes no write of these numbers."""

    def __init__(self, root: Path, refused: Container[int]) -> None:
        super().__init__(root)
        self.refused, self.number = refused, 0

    def write(self, name: str, data: bytes) -> None:
        self.number += 1
        if self.number in self.refused:
            raise UserError("the store is away", code=ExitCode.UNAVAILABLE)
        super().write(name, data)


@given(st.sets(st.integers(1, 12)), st.integers(1, 12))
def test_lines_are_whole_and_in_order_whatever_writes_fail(refused: set[int], lines: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        store = Away(Path(folder), refused)
        patch.setattr(metrics_writer, "open_storage", lambda _uri: store)
        warnings: list[str] = []
        log = MetricsLog("run", resumed_from_step=0, warn=warnings.append)
        for step in range(1, lines + 1):
            log.write(step, {"loss": 1 / step})
            log.flush()
        store.refused = ()
        log.store()
        assert [line["step"] for line in read_lines(store, FILE)] == list(range(1, lines + 1))
        in_a_row = [number for number in refused if number <= lines and number - 1 not in refused]
        assert len(warnings) == len(in_a_row)


def test_a_start_that_logged_nothing_leaves_a_file_that_the_next_start_reads(tmp_path: Path) -> None:
    MetricsLog(str(tmp_path), resumed_from_step=0).close()
    assert MetricsLog(str(tmp_path), resumed_from_step=5).lines() == []
