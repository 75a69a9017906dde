"""In `make test`, one run and the same with other rounding errors; in the long form, under each setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.numerics.settings import ALONE_ROUNDING, ALONE_THREADS, ROUNDING, SETTINGS, WITHIN, Setting
from tests.numerics.table import comparing, tried
from tests.support.paths import ROOT
from tests.support.short_form import chosen
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import ends_of_ranks, make_run, train_runs
from vlmpipe.trainer.config.job import JobConfig

LATE = {ALONE_ROUNDING: str(ROUNDING), ALONE_THREADS: "4"}  # these are read after torch is loaded
TRIED = chosen({"rounding": Setting(LATE), **SETTINGS}, "rounding".__eq__)
DRIVER = "tests.support.drivers.train_many"
RUN = {"features.cache": "off", "train.max_steps": 3, **EVERY_STEP}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@pytest.fixture(scope="module")
def reference(root: Path) -> JobConfig:
    job = make_run(root, "reference", RUN, features="off")
    train_runs([job], processes=1)
    return job


def _train(job: JobConfig, setting: Setting) -> None:
    """In a rank forked from a process that has torch loaded, where the setting is read after that."""
    arguments = ["--configs", f"{job.run.run_uri}/run.json"]
    if setting.environment.keys() <= LATE.keys():
        codes, said = ends_of_ranks(DRIVER, arguments, processes=1, **setting.environment)
        assert codes == [0], said
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting.environment}
    subprocess.run([sys.executable, "-m", DRIVER, *arguments], cwd=ROOT, env=environment, check=True, timeout=200)


@pytest.mark.parametrize("name", TRIED)
def test_a_run_is_the_same_under_another_setting_and_not_to_the_bit(
    name: str, root: Path, reference: JobConfig
) -> None:
    setting = TRIED[name]
    if why := setting.missing():
        pytest.skip(why)
    job = make_run(root, name.replace(" ", "-"), RUN, features="off")
    _train(job, setting)
    require_equal_training(job, reference)
    found, expected = trained_weights(job), trained_weights(reference)
    assert not all(torch.equal(found[each], weight) for each, weight in expected.items()), "it changed nothing"


def test_a_setting_that_this_processor_lacks_is_named() -> None:
    assert Setting({}, needs="no_such_flag").missing() == "this processor has no no_such_flag"
    assert not SETTINGS["SSE2"].missing()


def test_the_files_that_compare_numbers_are_found() -> None:
    found = {str(path) for path in comparing()}
    assert "tests/integration/trainer/models/test_lora.py" in found
    assert "tests/unit/trainer/models/loss/test_chunked_loss.py" in found
    assert "tests/unit/trainer/test_redaction.py" not in found
    assert {str(path) for path in comparing(WITHIN)} < found


def test_a_failure_is_counted_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "test_wrong.py"
    tests = [f"def test_{number}():\n    assert os.environ['OMP_NUM_THREADS'] == '{number}'\n" for number in (1, 4)]
    patient = "def test_limits():\n    from tests.support.short_form import PATIENCE\n    assert PATIENCE > 1\n"
    file.write_text("\n".join(["import os\n", *tests, patient]))
    counts, said = tried(Setting({"OMP_NUM_THREADS": "4"}), [file])
    assert counts == {"failed": 1, "passed": 2} and "'4' == '1'" in said
    file.write_text("no python")
    assert tried(Setting({}), [file])[0]["error"] == 1
