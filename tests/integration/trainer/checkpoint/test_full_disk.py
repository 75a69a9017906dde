"""A disk without room for the optimizer's state (train.nvme_path), or for a checkpoint of it: exit code 73, no rank
waits for another, and nothing is left."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk import SmallDisk, ext4_disk
from tests.support.short_form import chosen, only_whole
from tests.support.trainer.runs import encode_features, ends_of_ranks, make_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="state lies in mapped files, whose room is taken first")
RANKS = 2
STRATEGIES = chosen({name: name for name in ("zero2", "zero3")}, lambda name: name == "zero2")
KIB = 1 << 10
# Of the tiny model each rank has four files of 78 KiB: weights, two moments, the average. Both ranks' are 625 KiB. Of a
# checkpoint all but what describes its tensors is asked for before training begins: 782 KiB of 870, under zero3 625.
NO_STATE = {"zero2": 100 * KIB, "zero3": 100 * KIB}
NO_CHECKPOINT = {"zero2": 1440 * KIB, "zero3": 1300 * KIB}
STATE_FILE = 120 * KIB  # the largest that a file may be where only a checkpoint's are refused


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    encode_features(make_run(folder, "features"))
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with ext4_disk(tmp_path / "disk") as disk:
        yield disk


def run_of(root: Path, name: str, strategy: str, state: Path) -> JobConfig:
    changes: dict[str, Any] = {
        "train.strategy": strategy, "train.offload": "optimizer", "train.nvme_path": str(state),
        "train.ema_decay": 0.9, "train.checkpoint_every_steps": 2, "train.max_steps": 2,
        "checkpoint.max_s_without_commit": 0,
    }  # fmt: skip
    return make_run(root, name, changes)


def config_of(job: JobConfig) -> str:
    return f"{job.run.run_uri}/run.json"


@only_whole
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("leave_bytes", "sentence"),
    [
        (
            NO_STATE,
            r"train\.nvme_path: .*/disk has .* GiB left, too few for .* of optimizer state",
        ),
        (NO_CHECKPOINT, r"no space left while writing a checkpoint to .*/disk/vlmpipe-save-"),
    ],
    ids=["state", "checkpoint"],
)
def test_full_disk_ends_all_ranks_with_an_error_and_frees_its_space(
    strategy: str, leave_bytes: dict[str, int], sentence: str, root: Path, disk: SmallDisk, tmp_path: Path
) -> None:
    job = run_of(root, f"{strategy} {leave_bytes[strategy]}", strategy, disk.folder)
    disk.fill(None, leave_bytes=leave_bytes[strategy])
    before = disk.free_bytes()
    arguments = ["--configs", config_of(job)]
    places = {"TMPDIR": str(disk.folder), "VLMPIPE_CACHE_DIR": str(tmp_path / "cache")}  # of checkpoints alone
    codes, said = ends_of_ranks("tests.support.drivers.train_many", arguments, processes=RANKS, **places)
    assert codes == [ExitCode.CANNOT_WRITE] * RANKS, said
    assert all(re.search(sentence, text) for text in said), said
    assert {path.name for path in disk.folder.iterdir()} == {"ballast", "lost+found"}
    assert disk.free_bytes() == before
    disk.free()
    assert ends_of_ranks("tests.support.drivers.train_many", arguments, processes=RANKS)[0] == [0] * RANKS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_no_rank_waits_for_one_that_cannot_write_its_part_of_a_checkpoint(
    strategy: str, rank: int, root: Path, tmp_path: Path
) -> None:
    job = run_of(root, f"{strategy} rank {rank}", strategy, tmp_path / "state")
    arguments = ["--config", config_of(job), "--rank", str(rank), "--largest-file-bytes", str(STATE_FILE)]
    codes, said = ends_of_ranks("tests.support.drivers.train_limited", arguments, processes=RANKS, timeout_s=60)
    assert codes == [ExitCode.CANNOT_WRITE] * RANKS, said
    assert all("no space left while writing a checkpoint to" in text for text in said), said
