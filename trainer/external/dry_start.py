"""Check whether a training program could start on this machine: its Python, its program or script, and what that
imports.
"""

from __future__ import annotations

import ast
import contextlib
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig, python_of_image
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.external.versions import versions_in

_FIND = (
    "import importlib.util, json, sys; sys.path.insert(0, sys.argv[1]); "
    "print(json.dumps([name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]))"
)


def require_module(trainer: ExternalTrainerConfig, packages: Sequence[str]) -> None:
    """Raise ConfigError where packages are missing or none of them has python_module. Those on gs:// are not read."""
    path = trainer.python_module.replace(".", "/")
    for uri in packages:
        if "://" in uri:
            return
        # Of a project that is not built yet, files may be renamed.
        requested = path.rpartition("/")[2] if Path(uri).is_dir() else path
        ends = tuple(f"/{name}" for name in (f"{requested}.py", f"{requested}/__main__.py"))
        try:
            names = _members(Path(uri))
        except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"train.trainer.package_uris: {uri} cannot be read: {error}",
                expected="a folder with a Python project, a source distribution or a wheel",
            ) from error
        if any(f"/{name}".endswith(ends) for name in names):
            return
    raise ConfigError(
        f"train.trainer.python_module: no package of package_uris has {trainer.python_module}",
        expected=f"{path}.py or {path}/__main__.py in one of them",
        fix="correct the module, or build the package again: files that its pyproject.toml does not name are left out",
    )


def _members(package: Path) -> list[str]:
    if package.is_dir():
        return [str(path) for path in package.rglob("*.py")]
    if package.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(package) as archive:
            return archive.namelist()
    with tarfile.open(package) as archive:
        return archive.getnames()


def require_image_python(trainer: ExternalTrainerConfig) -> None:
    """Raise ConfigError where a package on this machine needs another Python than that in the image's name."""
    python = python_of_image(trainer.executor_image_uri)
    for uri in trainer.package_uris if python else ():
        requires = "" if "://" in uri else _requires_python(Path(uri))
        if python and not _suits(requires, python):
            raise ConfigError(
                f"train.trainer.executor_image_uri has Python {python[0]}.{python[1]}: {trainer.executor_image_uri}",
                expected=f"Python {requires}, which {uri} requires",
                fix="use an image with such a Python, or kind command with an image of your own",
            )


def _requires_python(package: Path) -> str:
    """The package's requires-python; empty where it does not say, or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, tarfile.TarError, zipfile.BadZipFile):
        if package.is_dir():
            project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
            return str(project["project"]["requires-python"])
        name = next(name for name in _members(package) if re.fullmatch(r"[^/]+(\.dist-info/METADATA|/PKG-INFO)", name))
        if package.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(package) as archive:
                text = archive.read(name)
        else:
            with tarfile.open(package) as archive:
                member = archive.extractfile(name)
                text = member.read() if member else b""
        return email.message_from_bytes(text).get("Requires-Python", "")
    return ""


def _suits(requires: str, python: tuple[int, int]) -> bool:
    """Return whether a minor version of Python is not excluded by specifiers such as >=3.11,<3.14."""
    for operator, major, minor, rest in re.findall(r"(>=|<=|==|!=|~=|<|>)\s*(\d+)(?:\.(\d+))?(\.\d+)?", requires):
        bound = (int(major), int(minor or 0))
        excluded = {
            ">=": python < bound,
            "~=": python < bound or python[0] > bound[0] or bool(rest and python > bound),
            ">": python < bound,  # 3.10.1 is more than 3.10, and images have some such patch
            "<=": python > bound or (python == bound and rest in ("", ".0")),
            "!=": python == bound and bool(minor) and not rest and f"{minor}.*" in requires,
            "<": python > bound or (python == bound and rest in ("", ".0")),
            "==": python != bound if minor else python[0] != bound[0],
        }
        if excluded[operator]:
            return False
    return True


def require_startable(trainer: ExternalTrainerConfig) -> str:
    """Describe what would start. Does not start it.

    Raises ConfigError for a missing Python, program or script, UserError (69) for a package that the script imports and
    its environment lacks.
    """
    python = os.path.abspath(trainer.python or sys.executable)
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"train.trainer.python: there is no {python}",
            expected="the Python of the program's environment",
            fix=f"make that environment (make recipe-{trainer.name} for a shipped recipe), or correct the path",
        )
    if trainer.kind == "package":
        require_module(trainer, trainer.package_uris)
        require_image_python(trainer)
        return f"packages {', '.join(trainer.package_uris)}, installed when the job starts"
    bin_folder = os.path.dirname(python)
    program, path = trainer.command[0], os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)])
    for field, name in (("launch", "horovodrun" if trainer.launch == "horovod" else program), ("command", program)):
        if shutil.which(name, path=path) is None:
            raise ConfigError(
                f"train.trainer.{field}: there is no program {name}",
                expected=f"one in {bin_folder} or on PATH",
                fix="install the package that brings it, or name its environment's Python in train.trainer.python",
            )
    versions = versions_in(python)
    script = _script(trainer)
    if script and not script.is_file():
        raise ConfigError(
            f"train.trainer.command: there is no file {script}",
            expected="the program's script, by a path from the folder in which vlmpipe is started",
        )
    if script and (missing := _missing(python, script)):
        raise UserError(
            f"{script} imports {', '.join(missing)}, which {python} does not find",
            expected="all packages that it imports in that environment",
            fix=f"install them there: {python} -m pip install ... (make recipe-{trainer.name} for a shipped recipe)",
            code=ExitCode.UNAVAILABLE,
        )
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{script or program} can start ({text})"


def _script(trainer: ExternalTrainerConfig) -> Path | None:
    """The script of `python script.py ...`; None for modules and other programs."""
    program, *words = trainer.command
    first = words[0] if words else ""
    is_python = os.path.basename(program).startswith("python")
    return Path(first) if is_python and first.endswith(".py") and "{" not in first else None


def _missing(python: str, script: Path) -> list[str]:
    """Modules that the script imports at its top level, outside of try, and that are not found."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"train.trainer.command: {script} is no Python: {error}") from error
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
    modules = sorted({name.partition(".")[0] for name in names} - {"", "__future__"})
    command = [python, "-I", "-c", _FIND, str(script.parent), *modules]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", errors="replace")
    missing: list[str] = json.loads(ended.stdout) if ended.returncode == 0 else []
    return missing
