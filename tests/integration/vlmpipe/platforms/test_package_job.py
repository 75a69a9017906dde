"""A Python-package job on this machine: its packages in an environment of their own, the contract as for a command."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.external_runs import PROGRAM, external_run
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.platforms.local.jobs.package_environment import package_python
from vlmpipe.trainer.errors import ConfigError

BUILD = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "counter"
version = "1.0"
[tool.setuptools]
packages = ["counter"]
"""


def source_distribution(folder: Path) -> str:
    path = folder / "counter-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (
            ("pyproject.toml", BUILD),
            ("counter/__init__.py", ""),
            ("counter/task.py", PROGRAM.read_text()),
        ):
            member = tarfile.TarInfo(f"counter-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return str(path)


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*absent-1\.0\.tar\.gz"):
        package_python([str(tmp_path / "absent-1.0.tar.gz")], tmp_path / "pip.log")


@pytest.mark.slow  # pip fetches what builds the package
def test_a_package_job_trains_as_a_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(cache))
    uris = [source_distribution(tmp_path)]
    package: dict[str, Any] = {"executor_image_uri": "image", "package_uris": uris}
    command = ["plain", "{max_steps}"]
    run = external_run(tmp_path, kind="package", **package, python_module="counter.task", command=command)
    package |= {"python_module": "vlmpipe.trainer.external.launch", "args": run.command()[3:]}
    pool = {"machine_spec": {"machine_type": "n1-standard-4"}, "python_package_spec": package, "replica_count": 1}
    spec = {"worker_pool_specs": [pool], "base_output_directory": {"output_uri_prefix": run.uri}}
    run_job("train", spec, labels={STEP_LABEL: "train"})

    by_command = external_run(tmp_path, run_id="command")
    assert by_command.launch()[0] == 0
    assert run.result() == by_command.result()
    assert len(list(cache.glob("environments/*/ready"))) == 1
