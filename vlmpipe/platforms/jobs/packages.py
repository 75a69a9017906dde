"""Packages of Python-package jobs: folders among them are built, and for Vertex AI all are uploaded."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.external.dry_start import require_module
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import cache_folder, join_uri

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

FOLDER = "packages"  # of the cache, and of gcp.pipeline_root
NOT_BUILT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules", "venv")
FIRST_ZIP_TIME = "315532800"  # 1980: the same sources give the same bytes


def here(uri: str) -> bool:
    """Return whether the package lies on this machine."""
    return "://" not in uri


def built(uri: str) -> Path:
    """The package file of `uri` on this machine: itself, or the wheel of the project in that folder.

    A folder is built from a copy, so that nothing is left in it. Raises ConfigError for what is no
    package, UserError (69) where pip cannot build it.
    """
    folder = Path(uri)
    if not folder.is_dir():
        return folder
    if not any((folder / name).is_file() for name in ("pyproject.toml", "setup.py")):
        raise ConfigError(
            f"train.trainer.package_uris: {uri} has no pyproject.toml",
            expected="a folder with a Python project, a source distribution or a wheel",
        )
    with os_errors(f"building {uri}"), tempfile.TemporaryDirectory() as scratch:
        source, wheels = Path(scratch, "source"), Path(scratch, "wheels")
        shutil.copytree(folder, source, ignore=NOT_BUILT)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": FIRST_ZIP_TIME}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, encoding="utf-8", errors="replace"
        )
        if ended.returncode:
            raise UserError(
                f"train.trainer.package_uris: {uri} cannot be built: {ended.stderr.strip().splitlines()[-1:]}",
                expected="a project that pip builds",
                fix=f"run pip wheel --no-deps {uri} and correct what it reports",
                code=ExitCode.UNAVAILABLE,
            )
        (wheel,) = wheels.iterdir()
        destination = cache_folder() / FOLDER / _digest(wheel) / wheel.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(wheel, destination)
    return destination


def packaged(config: RunConfig) -> tuple[RunConfig, dict[str, Path]]:
    """`config` with packages on gs:// only, and the files to upload first: files by address.

    Addresses contain digests of the files: a package that did not change is not uploaded again.
    """
    trainer, root = config.train.trainer, config.gcp.pipeline_root
    if trainer is None or not root or not any(map(here, trainer.package_uris)):
        return config, {}
    files = {uri: built(uri) for uri in trainer.package_uris if here(uri)}
    require_module(trainer, [str(files.get(uri, uri)) for uri in trainer.package_uris])
    addresses = {uri: join_uri(root, FOLDER, _digest(path), path.name) for uri, path in files.items()}
    uris = tuple(addresses.get(uri, uri) for uri in trainer.package_uris)
    changed = trainer.model_copy(update={"package_uris": uris})
    train = config.train.model_copy(update={"trainer": changed})
    return config.model_copy(update={"train": train}), {addresses[uri]: path for uri, path in files.items()}


def upload(files: dict[str, Path]) -> None:
    """Put each file at its address, unless it is there."""
    for address, path in files.items():
        folder, _, name = address.rpartition("/")
        store = open_storage(folder)
        if store.stat(name) is None:
            store.upload(path, name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
