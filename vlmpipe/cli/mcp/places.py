"""Folders that a command of the server may open besides the root, by the kernel: programs, devices, caches, logins."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import vlmpipe
from vlmpipe.trainer.storage.base import cache_folder

SYSTEM = (
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/opt", "/etc", "/proc", "/sys", "/nix/store",
    "/run/systemd/resolve", "/run/nvidia-persistenced", "/var/lib/dcgm-exporter",
)  # fmt: skip
DEVICES = ("/dev",)
CACHES = ("huggingface", "vlmpipe", "torch", "torch_extensions")  # below ~/.cache
LOGINS = (".config/gcloud", ".kube", ".aws")  # below the home: only the libraries of these services are given them
LOGIN_VARIABLES = ("GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
CACHE_VARIABLES = ("HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")


def readable() -> tuple[str, ...]:
    """Programs and logins."""
    return _distinct(_programs(), _logins())


def writable() -> tuple[str, ...]:
    """Devices, and folders of copies that libraries keep for all runs. Missing ones of these are made."""
    home = Path.home()
    caches = [home / ".cache" / name for name in CACHES] + [home / ".triton", cache_folder()]
    caches += [Path(value) for name in CACHE_VARIABLES if (value := os.environ.get(name))]
    for cache in caches:
        cache.mkdir(parents=True, exist_ok=True)
    return _distinct(DEVICES, map(str, caches))


def _programs() -> Iterator[str]:
    yield from SYSTEM
    package = Path(vlmpipe.__file__).parent
    yield str(package)
    yield from (str(path) for path in package.iterdir() if path.is_symlink())  # folders at the top of a clone
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages())
    yield from (path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))


def _logins() -> Iterator[str]:
    yield from (str(Path.home() / name) for name in LOGINS)
    for name in LOGIN_VARIABLES:
        yield from filter(None, os.environ.get(name, "").split(os.pathsep))


def _distinct(*groups: Iterator[str] | tuple[str, ...] | map[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(place) for group in groups for place in group if place != "/"))
