"""Folders with models on this machine, as transformers reads them: a user's own, or a copy of one in a bucket.

A bucket's folder is identified by its revision, a digest of the names and generations of its files. Each revision has
a folder of its own in this machine's cache, so files there never change. The first process that needs a file downloads
it, and checks its CRC32C against the bucket's; the others wait for it. Locks are the kernel's and end with their
process:

- `<name>.stage`, exclusive: one process downloads.
- `<name>.use`, shared for the life of each process that reads the folder, exclusive to delete it.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import BUCKETS_MOUNT, TEMPORARY_PREFIX, ObjectInfo, Storage, cache_folder, in_bucket
from vlmpipe.trainer.storage.export_manifest import MARKER, require_described
from vlmpipe.trainer.storage.regular_files import open_lock, require_regular_files
from vlmpipe.trainer.storage.transfer import in_parallel
from vlmpipe.trainer.storage.user_folders import expanded

CACHE_FOLDER = ".models"
CONFIG, WEIGHTS, INDEX = "config.json", ".safetensors", ".safetensors.index.json"
SETTINGS = (".json", ".txt", ".model", ".jinja")  # endings of configurations and tokenizers
CLOSE = 0.8  # of names, by which a typing error is told from another name
RECIPES = "build/recipes/"  # folders of the models of recipes/, which make prepares
KEPT = 3  # copies that no process uses, of which the machine keeps those used last
REVISION_DIGITS = 16
_in_use: dict[Path, int] = {}  # folders that this process reads -> descriptor of the lock


def bucket_address(name: str) -> str:
    """The address of a folder in a bucket, also where it is named by its mount; empty for others."""
    mount = f"{BUCKETS_MOUNT}/"
    address = f"gs://{name.removeprefix(mount)}" if name.startswith(mount) else name
    return address.rstrip("/") if in_bucket(address) else ""


@dataclass(frozen=True)
class BucketFolder:
    """A model's files in a bucket, to be read in place in the versions that they had when they were listed."""

    store: Storage
    files: dict[str, ObjectInfo]


def folder_in_bucket(name: str, revision: str = "") -> BucketFolder | None:
    """The files of a model in a bucket, without copying any; None for other places. Raises as `local_folder` does."""
    address = bucket_address(name)
    if not address:
        return None
    store = open_storage(address)
    files = _files(store)
    _require_revision(address, files, revision)
    if any(info.name == MARKER for info in files):
        require_described(store, files)
    return BucketFolder(store, {info.name: info for info in files})


def local_folder(name: str, revision: str = "", *, weights: bool = True, also: str = "") -> Path | None:
    """The folder of a model or tokenizer on this machine; None for what is no folder, such as a hub id.

    Raises ConfigError for a bucket's folder without a model, or not of this `revision`; DataError for a file that is no
    regular file, and for an export that is damaged.

    Args:
        weights: also those, with an export's checksums; otherwise configuration and tokenizer only.
        also: a small file of safetensors beside the model's weights, if it is there.
    """
    if address := bucket_address(name):
        return _staged(address, revision, _Wanted(weights, also))
    folder = expanded(name)
    if not folder.is_dir():
        if "/" not in name and (close := folder_like(name)):  # almost every hub id has an owner
            raise ConfigError(
                f"there is no folder {name}", expected="a folder, or a hub id", fix=f"did you mean {close}?"
            )
        return None
    require_regular_files(folder)
    if weights and (folder / MARKER).is_file():
        _check_once(folder.absolute())
    return folder


def making(name: str) -> str:
    """How a folder that is not there is made, if it is one of the shipped recipes."""
    return f"make {name}/{CONFIG} makes it, in a clone of vlmpipe" if name.startswith(RECIPES) else ""


def folder_like(name: str) -> str:
    """The folder of a model on this machine whose name is nearly this one, which names none; empty without one."""
    path = Path(os.path.expanduser(name))
    with contextlib.suppress(OSError):
        models = [config_path.parent.name for config_path in path.parent.glob(f"*/{CONFIG}")]
        if not path.exists() and (close := difflib.get_close_matches(path.name, models, 1, CLOSE)):
            return str(path.with_name(close[0]))
    return ""


def revision_of(address: str, expected: str = "") -> str:
    """The revision of a bucket's folder now. Raises ConfigError if another is expected."""
    return _require_revision(address, _files(open_storage(address)), expected)


def _require_revision(address: str, files: Sequence[ObjectInfo], expected: str) -> str:
    revision = _revision(files)
    if expected not in ("", revision):
        raise ConfigError(
            f"{address} has changed: it is at revision {revision}",
            expected=f"revision {expected}, which the run file names or the run began with",
            fix="restore the folder's files, or start a new run with the new ones",
        )
    return revision


@dataclass(frozen=True)
class _Wanted:
    """Files of a folder: all, or those of which none but `also` ends as weights do."""

    weights: bool
    also: str = ""

    def __contains__(self, info: ObjectInfo) -> bool:
        return self.weights or not info.name.endswith(WEIGHTS) or info.name == self.also


def _staged(address: str, revision: str, request: _Wanted) -> Path:
    place = hashlib.sha256(address.encode()).hexdigest()[:REVISION_DIGITS]
    root = cache_folder() / CACHE_FOLDER
    listing = root / f"{place}-{revision}" / f"{TEMPORARY_PREFIX}files"
    # A known revision is not looked up again, unless its listing was cut off as earlier versions wrote it.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        if revision and _use(listing.parent) and not _lacking(listing.parent, _listed(listing), request):
            return listing.parent
    store = open_storage(address)
    files = _files(store)
    folder = root / f"{place}-{_require_revision(address, files, revision)}"
    with os_errors(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        _use(folder)
        os.utime(folder)  # the time of last use
        with _locked(root / f"{folder.name}.stage"):
            if _lacking(folder, files, request):
                _delete_unused(root)
                _download(store, files, folder, request)
    return folder


def _files(store: Storage) -> list[ObjectInfo]:
    """The model's files in the order in which they are needed. Subfolders belong to other formats."""
    files = [info for info in store.list() if "/" not in info.name and info.name.endswith((*SETTINGS, WEIGHTS))]
    if not any(info.name.endswith("config.json") for info in files):
        raise ConfigError(
            f"there is no model in {store.root_uri}",
            expected=f"a folder with {CONFIG} and safetensors files, or with a tokenizer",
            fix="correct the address, or copy a model there as save_pretrained writes it",
        )
    return sorted(files, key=lambda info: (info.name != CONFIG, info.name.endswith(WEIGHTS), info.name))


def _revision(files: Sequence[ObjectInfo]) -> str:
    named = json.dumps([[info.name, info.version] for info in files])
    return hashlib.sha256(named.encode()).hexdigest()[:REVISION_DIGITS]


def _lacking(folder: Path, files: Sequence[ObjectInfo], request: _Wanted) -> list[ObjectInfo]:
    """Files that are not in the folder yet. Only whole ones get their names."""
    return [info for info in files if info in request and not (folder / info.name).is_file()]


def _download(store: Storage, files: Sequence[ObjectInfo], folder: Path, request: _Wanted) -> None:
    """Configuration first, so that what cannot be read costs no download of weights."""
    if request.weights and any(info.name == MARKER for info in files):
        require_described(store, list(files))

    def fetch(info: ObjectInfo) -> None:
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)
        os.close(handle)
        try:
            store.download(info.name, Path(temporary))  # checks the CRC32C
            os.replace(temporary, folder / info.name)
        finally:
            Path(temporary).unlink(missing_ok=True)

    for _ in in_parallel(fetch, _lacking(folder, files, request)):
        pass
    if _revision(_files(store)) != _revision(files):
        shutil.rmtree(folder)
        raise DataError(f"{store.root_uri} changed while it was copied", fix="start again when no program writes there")
    listing = json.dumps([[info.name, info.size_bytes, info.version] for info in files])
    place = folder / f"{TEMPORARY_PREFIX}files"
    whole = place.with_name(f"{place.name}-{uuid.uuid4().hex}")
    whole.write_text(listing, encoding="utf-8")
    os.replace(whole, place)


def _listed(listing: Path) -> list[ObjectInfo]:
    return [ObjectInfo(*fields) for fields in json.loads(listing.read_text(encoding="utf-8"))]


def _use(folder: Path) -> bool:
    """Keep the folder from being deleted while this process lives."""
    if folder not in _in_use:
        lock = open_lock(folder.with_name(f"{folder.name}.use"))
        fcntl.flock(lock, fcntl.LOCK_SH)
        _in_use[folder] = lock
    return True


def _delete_unused(root: Path) -> None:
    """Make room: delete all but the copies used last."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
    for folder in [path for path in folders if path not in _in_use][KEPT:]:
        with contextlib.suppress(BlockingIOError), _locked(root / f"{folder.name}.use", fcntl.LOCK_NB):
            shutil.rmtree(folder)


def _check_once(folder: Path) -> None:
    """Check an export against its description, once on this machine while its files are not written."""
    files = open_storage(str(folder)).list()
    state = json.dumps([str(folder), *([info.name, info.size_bytes, info.version] for info in files)])
    root = cache_folder() / CACHE_FOLDER
    checked = root / f"{hashlib.sha256(state.encode()).hexdigest()}.checked"
    with os_errors(f"writing {root}"):
        root.mkdir(exist_ok=True)
        with _locked(root / "checks.stage"):
            if not checked.exists():
                require_described(open_storage(str(folder)), files)
                checked.touch()


@contextlib.contextmanager
def _locked(path: Path, also: int = 0) -> Iterator[None]:
    with os.fdopen(open_lock(path), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | also)
        yield
