"""Environments of Python-package jobs on this machine: one for each set of packages, kept in the cache folder.

Vertex AI installs the packages into an executor image. What that image holds beforehand is not known here; this
machine's own environment takes its place, below the packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from vlmpipe.platforms.jobs.packages import built
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import cache_folder, crc32c_of_file
from vlmpipe.trainer.storage.regular_files import open_lock

FOLDER, READY = "environments", "ready"


def package_python(package_uris: Sequence[str], log: Path) -> str:
    """The Python of an environment with these packages, made unless it is there. pip's output goes to `log`.

    Raises ConfigError for a package that is not there, UserError (69) where pip cannot install them.
    """
    files = [_fetched(uri) for uri in package_uris]
    described = [[uri, crc32c_of_file(path)] for uri, path in zip(package_uris, files, strict=True)]
    digest = hashlib.sha256(json.dumps([sys.version, sys.prefix, *described]).encode()).hexdigest()[:16]
    folder = cache_folder() / FOLDER / digest
    python = folder / "bin" / "python"
    with os_errors(f"making {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_lock(folder.with_suffix(".lock")), "w", encoding="utf-8") as lock, log.open("ab") as output:
            fcntl.flock(lock, fcntl.LOCK_EX)  # replicas of other jobs may want the same one
            if not (folder / READY).exists():
                _run([sys.executable, "-m", "venv", "--clear", str(folder)], output)
                below = folder / sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/") / "below.pth"
                # Not the bare path: editable installations there are path files of their own.
                below.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8")
                _run([str(python), "-m", "pip", "install", *map(str, files)], output)
                (folder / READY).touch()
    return str(python)


def _fetched(uri: str) -> Path:
    """The package on this machine, under its own name, which pip reads."""
    if Path(uri).is_dir():
        return built(uri)
    folder, _, name = uri.rpartition("/")
    store = open_storage(folder or ".")
    if store.stat(name) is None:
        raise ConfigError(
            f"python_package_spec.package_uris: there is no {uri}", expected="a source distribution or wheel"
        )
    path = store.fetch(name)
    if path.name == name:
        return path
    destination = cache_folder() / FOLDER / "packages" / hashlib.sha256(uri.encode()).hexdigest()[:16] / name
    with os_errors(f"writing {destination}"):
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_bytes(path.read_bytes())
    return destination


def _run(command: Sequence[str], output: object) -> None:
    ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)  # type: ignore[call-overload]
    if ended.returncode:
        raise UserError(
            f"the packages of the job cannot be installed: {' '.join(command[:4])} ended with {ended.returncode}",
            expected="packages that pip installs",
            fix=f"read pip's own error in {getattr(output, 'name', 'the log')}",
            code=ExitCode.UNAVAILABLE,
        )
