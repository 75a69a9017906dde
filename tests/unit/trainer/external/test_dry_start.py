"""What a program lacks is said before data is prepared, and nothing of it is started for that."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.external.dry_start import require_startable

SCRIPT = """
from __future__ import annotations
import json, vlmpipe_no_such_package.part
from vlmpipe_no_other import name
from neighbour import thing
from .relative import other
try:
    import vlmpipe_optional
except ImportError:
    pass
raise SystemExit("it was started")
"""


def trainer(*command: str, **changes: Any) -> ExternalTrainerConfig:
    return ExternalTrainerConfig(name="mine", command=command, **changes)


def refused(*command: str, **changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        require_startable(trainer(*command, **changes))
    return caught.value


def test_packages_that_the_script_imports_and_nothing_brings_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("thing = 1")
    error = refused("python", str(script), "{data}")
    assert error.code == ExitCode.UNAVAILABLE
    assert f"{script} imports vlmpipe_no_other, vlmpipe_no_such_package, which {sys.executable}" in error.found

    script.write_text(SCRIPT.replace("vlmpipe_no_such_package.part", "os.path").replace("vlmpipe_no_other", "re"))
    assert f"{script} can start (python 3." in require_startable(trainer("python", str(script)))


@pytest.mark.parametrize(
    ("command", "changes", "sentence"),
    [
        (("vlmpipe-no-such-program", "a"), {}, "there is no program vlmpipe-no-such-program"),
        (("python", "a.py"), {"launch": "horovod"}, "train.trainer.launch: there is no program horovodrun"),
        (("python", "no/such/train.py"), {}, "there is no file no/such/train.py"),
        (("python", "a.py"), {"python": "/no/such/bin/python"}, "there is no /no/such/bin/python"),
        (("python", "a.py"), {"python": "/bin/false"}, "/bin/false does not start"),
    ],
)
def test_a_missing_python_program_or_script_is_a_wrong_setting(
    command: tuple[str, ...], changes: dict[str, str], sentence: str
) -> None:
    error = refused(*command, **changes)
    assert (error.code, sentence in error.found) == (ExitCode.CONFIG, True), error.found


def test_a_script_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def (")
    assert "is no Python" in refused("python", str(tmp_path / "a.py")).found


def test_modules_other_programs_and_packages_are_taken_as_they_are() -> None:
    assert require_startable(trainer("python", "-m", "anything", launch="each-node")).startswith("python can start")
    package = {"package_uris": ("gs://b/a.tar.gz",), "executor_image_uri": "i", "python_module": "a.task"}
    assert "gs://b/a.tar.gz, installed when the job starts" in require_startable(trainer(kind="package", **package))


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


def with_python(path: Path, requires: str) -> Path:
    """A package with a module that needs a Python."""
    if path.suffix == "":
        (path / "mine").mkdir(parents=True)
        (path / "mine/task.py").touch()
        (path / "pyproject.toml").write_text(f'[project]\nname = "mine"\nrequires-python = "{requires}"\n')
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("mine/task.py", "")
            archive.writestr("mine-1.0.dist-info/METADATA", f"Name: mine\nRequires-Python: {requires}\n")
    else:
        (folder := path.parent / "mine-1.0").mkdir()
        (folder / "PKG-INFO").write_text(f"Name: mine\nRequires-Python: {requires}\n")
        (folder / "task.py").touch()
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder / "PKG-INFO", "mine-1.0/PKG-INFO")
            archive.add(folder / "task.py", "mine-1.0/mine/task.py")
    return path


@pytest.mark.parametrize("name", ["folder", "mine-1.0-py3-none-any.whl", "mine-1.0.tar.gz"])
@pytest.mark.parametrize(
    ("requires", "starts"),
    [
        (">=3.11", False), (">=3.10,<3.14", True), ("<3.10", False), ("==3.12.*", False), ("~=3.9", True), ("", True),
        (">3.10", True), ("<=3.10", False), ("<=3.10.20", True), ("~=3.9.2", False), ("!=3.10.*", False),
        ("!=3.10", True),
    ],
)  # fmt: skip
def test_a_packages_python_is_compared_with_that_in_the_images_name(
    name: str, requires: str, starts: bool, tmp_path: Path
) -> None:
    package = with_python(tmp_path / name, requires)
    mine = trainer_with(package).model_copy(update={"executor_image_uri": "r/pytorch-gpu.2-4.py310:latest"})
    if starts:
        assert name in require_startable(mine)
    else:
        with pytest.raises(ConfigError, match=r"has Python 3\.10") as refused:
            require_startable(mine)
        assert f"Python {requires}, which {package} requires" in refused.value.expected


def test_an_image_whose_name_has_no_python_is_taken_as_it_is(tmp_path: Path) -> None:
    assert "installed when" in require_startable(trainer_with(with_python(tmp_path / "folder", ">=3.99")))
