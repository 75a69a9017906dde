"""Data sets of the Hugging Face hub, fetched into a folder of Parquet files that a run file names.

A run itself never asks the hub for data: the folder stays as it was fetched, can be copied to a bucket, and `check`
needs no network.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.confinement.limits import HUB, require_address
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, os_errors, require_package
from vlmpipe.trainer.storage.hub.client import TOKEN

ID = re.compile(r"[\w.-]+/[\w.-]+")
SHARD_BYTES = 500_000_000
ORIGIN = "fetched.json"  # in the folder: what was fetched


@dataclass(frozen=True)
class Fetched:
    """Files that were fetched. commit: of the data set on the hub, empty for one of this machine. samples: of each
    split.
    """

    folder: Path
    name: str
    subset: str
    commit: str
    samples: dict[str, int]
    size_bytes: int


def fetch(name: str, folder: Path, *, subset: str = "", revision: str = "") -> Fetched:
    """Fetch a data set by its id OWNER/NAME, or convert a folder that the package datasets reads.

    The folder appears when it is whole, and nothing is left of a fetch that fails. Splits keep their names, by which
    preparation knows what is held out.

    Args:
        subset: of a data set with several; datasets calls it the configuration's name.
        revision: branch, tag or commit; the default branch without one.

    Raises:
        ConfigError: The folder is not empty, the id is none, or a subset has to be named.
        DataError: The files cannot be read as one table.
        UserError: The hub cannot be reached (69), or has no such data set for this token (66).
    """
    require_package("datasets")
    if not ID.fullmatch(name) and not Path(name).is_dir():
        raise ConfigError(f"{name!r} is no data set's id", expected="OWNER/NAME, as in its address on the hub")
    if folder.name in ("", ".."):
        raise ConfigError(f"--output is {folder}", expected="a folder by its name", fix="give a new folder's name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty", expected="a new or empty folder", fix="give another --output")
    if not Path(name).is_dir():
        require_address(HUB)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    partial = folder.with_name(f"{folder.name}.partial")
    with os_errors(f"writing {partial}"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with _hub_errors(name, subset):
            commit = "" if Path(name).is_dir() else _commit_of(name, revision)
            builder = datasets.load_dataset_builder(name, subset or None, revision=commit or None)
            builder.download_and_prepare(str(partial), file_format="parquet", max_shard_size=SHARD_BYTES)
        return _finished(partial, folder, name, subset, commit)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for lock in partial.parent.glob(f"{glob.escape(partial.name)}*.lock"):  # which datasets leaves
            lock.unlink(missing_ok=True)


def _finished(partial: Path, folder: Path, name: str, subset: str, commit: str) -> Fetched:
    import pyarrow.parquet as pq

    files = sorted(partial.glob("*.parquet"))
    samples: dict[str, int] = {}
    for path in files:
        split = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem).rpartition("-")[2]
        samples[split] = samples.get(split, 0) + pq.ParquetFile(path).metadata.num_rows
    size_bytes = sum(path.stat().st_size for path in files)
    origin = {"data_set": name, "subset": subset, "commit": commit, "samples": samples}
    with os_errors(f"writing {folder}"):
        (partial / "dataset_info.json").unlink(missing_ok=True)
        (partial / ORIGIN).write_text(json.dumps(origin, indent=1), encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    return Fetched(folder, name, subset, commit, samples, size_bytes)


def _commit_of(name: str, revision: str) -> str:
    """The commit that a revision is now, so that all files are of one."""
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(name, revision=revision or None).sha)


@contextmanager
def _hub_errors(name: str, subset: str) -> Iterator[None]:
    """Errors of the hub's client and of the package datasets as errors for people."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Of the HTTP client below, whose errors of connections come as they are.
    of_client: type[Exception] = HfHubHTTPError.__mro__[1]
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated, and this token may not read it",
            fix=f"accept its terms at https://huggingface.co/datasets/{name}; then {TOKEN}",
            code=ExitCode.NO_PERMISSION,
        ) from error
    except (DatasetNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(
            f"the hub has no data set {name} that this token may read, or not that revision",
            expected="an id as in its address on the hub, OWNER/NAME",
            fix=f"correct the id; for a private one {TOKEN}",
            code=ExitCode.NOT_FOUND,
        ) from error
    except (ConnectionError, LocalEntryNotFoundError, of_client) as error:
        raise UserError(
            f"the hub cannot be asked for {name}: {_first_line(error)}",
            expected="a network, or the data set's files on this machine",
            fix="try again with a network; copied files are read as they are: vlmpipe init --data FOLDER",
            code=ExitCode.UNAVAILABLE,
        ) from error
    except (DatasetsError, FileNotFoundError) as error:  # files without data, or of different columns
        raise DataError(
            f"{name} cannot be read as a table: {_first_line(error.__cause__ or error)}",
            expected="whole files of the same columns",
            fix="correct the files, or name a subset whose files have the same columns: --subset NAME",
        ) from error
    except RuntimeError as error:  # a program that would have to be run
        raise ConfigError(
            f"{name} cannot be read: {_first_line(error)}",
            expected="a data set of files",
            fix="choose a data set, or with --revision a state of it, that holds its data as files",
        ) from error
    except ValueError as error:  # of datasets, whose errors are its own texts
        raise ConfigError(
            f"{name}{f' with subset {subset}' if subset else ''} cannot be read: {_first_line(error)}",
            expected="a data set of files, and the name of a subset where it has several",
            fix=f"name one: --subset NAME; they are listed at https://huggingface.co/datasets/{name}",
        ) from error


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
