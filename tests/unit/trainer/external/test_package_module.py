"""A package is looked into before anything starts."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from trainer.config.external_trainer import ExternalTrainerConfig
from trainer.errors import ConfigError
from trainer.external.dry_start import require_startable


def packaged(path: Path, member: str) -> Path:
    (source := path.parent / "task.py").touch()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(source, member)
    else:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(source, member)
    return path


def trainer_with(package: Path) -> ExternalTrainerConfig:
    settings = {"name": "mine", "kind": "package", "executor_image_uri": "image", "python_module": "mine.task"}
    return ExternalTrainerConfig.model_validate({**settings, "package_uris": [str(package)]})


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("mine-1.0.tar.gz", "mine-1.0/src/mine/task.py"),
        ("mine-1.0.tar.gz", "mine-1.0/mine/task/__main__.py"),
        ("mine-1.0-py3-none-any.whl", "mine/task.py"),
    ],
)
def test_a_package_with_the_module_may_start(tmp_path: Path, name: str, member: str) -> None:
    assert name in require_startable(trainer_with(packaged(tmp_path / name, member)))


def test_a_package_without_the_module_is_refused(tmp_path: Path) -> None:
    package = packaged(tmp_path / "mine-1.0.tar.gz", "mine-1.0/mine/other_task.py")
    with pytest.raises(ConfigError, match=r"no package of package_uris has mine\.task"):
        require_startable(trainer_with(package))


def test_a_file_that_is_no_package_is_refused(tmp_path: Path) -> None:
    (package := tmp_path / "mine-1.0.tar.gz").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        require_startable(trainer_with(package))
