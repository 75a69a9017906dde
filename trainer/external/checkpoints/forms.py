"""Checkpoints that a training program leaves in a folder, by the form that its library writes.

checkpoint-N/trainer_state.json      transformers' Trainer, and whoever does as it does: written last
latest, <tag>/*_states.pt            DeepSpeed: rank 0 writes `latest` after its own files, before those of other ranks
<name ending in N>/**/.metadata      torch.distributed.checkpoint: written after the files of every rank

The step is the number at the end of the folder's name. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.external.follow import STATE, json_object, steps_of

INCOMPLETE = "checkpoint-is-incomplete.txt"  # transformers', while it saves after SIGTERM
LATEST, METADATA = "latest", ".metadata"
STATE_FOLDER = re.compile(r"checkpoint-(\d+)")
_STEP = re.compile(r"(\d+)$")
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_?(?P<of>optim|model)_states\.pt")
_WHOLE = re.compile(r"mp_rank_\d+_model_states\.pt")
_SHARDS = {"optim": "optimizer", "model": "weights"}  # of each process
ZIP, SAFETENSORS = b"PK\x03\x04", ".safetensors"
MAX_TAG_BYTES = 255
MAX_HEADER_BYTES = 100 << 20  # of safetensors
Stamp = tuple[str, int, int]  # a file's name, size and time of change


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is: the same on every node, though each holds other files of it."""

    watched: int  # index of the folder that programs save into
    path: str  # below that folder
    tag: str = ""  # DeepSpeed's: its folder in `path`

    def files(self, folders: list[Path]) -> dict[str, Path]:
        """This node's files by their names in the checkpoint. Raises Unfit for what cannot be copied."""
        root = folders[self.watched] / self.path
        files = dict(_files_below(root / self.tag if self.tag else root))
        if self.tag:
            files = {f"{self.tag}/{name}": path for name, path in files.items()}
        return files


@dataclass(frozen=True)
class Candidate:
    """A checkpoint on this node's disk that its program has named as finished, as far as this node sees."""

    step: int
    place: Place
    what: str  # for messages: its folder's name


class Unfit(Exception):
    """Why a checkpoint cannot be committed as it is."""


def stamps(files: Mapping[str, Path]) -> tuple[Stamp, ...]:
    """Sizes and times, by which a change is noticed; empty once a file is gone, as when the program deletes them."""
    try:
        return tuple((name, (at := path.stat()).st_size, at.st_mtime_ns) for name, path in sorted(files.items()))
    except OSError:
        return ()


def candidates_in(
    folders: list[Path], *, without: frozenset[int] = frozenset()
) -> Iterator[Candidate | tuple[Path, str]]:
    """Yield finished checkpoints, and for what looks like an unfinished one its folder and why it is not finished.

    without: indices of folders that are not looked at.
    """
    for watched, folder in enumerate(folders):
        for top, names, files in () if watched in without else os.walk(folder):
            here = Path(top)
            path = here.relative_to(folder).as_posix()
            if match := STATE_FOLDER.fullmatch(here.name):
                names.clear()  # whatever is inside belongs to it
                if STATE not in files:
                    yield here, f"it has no {STATE}, which is written last"
                elif INCOMPLETE not in files and steps_of(here) == int(match[1]):
                    yield Candidate(int(match[1]), Place(watched, path), here.name)
            elif LATEST in files and (tag := _tag(here, names)):
                yield from _tags(watched, here, path, tag, names)
                names[:] = [name for name in names if not _is_tag(here / name)]
            elif here != folder and _STEP.search(here.name) and (dcp := _dcp_folders(here)):
                names.clear()
                if lacking := [folder for folder in dcp if not (folder / METADATA).is_file()]:
                    yield here, f"{lacking[0].name} has no {METADATA}, which is written last"
                else:
                    yield Candidate(_step(here.name), Place(watched, path), here.name)
            elif any(_is_tag(here / name) for name in names):
                tags = [name for name in names if _is_tag(here / name)]
                names[:] = [name for name in names if name not in tags]
                yield from ((here / name, f"no file `{LATEST}` names it, which DeepSpeed writes last") for name in tags)


def _tags(watched: int, here: Path, path: str, tag: str, names: list[str]) -> Iterator[Candidate | tuple[Path, str]]:
    """The tag that `latest` names, and others, newer ones of which are unfinished."""
    if not _STEP.search(tag):
        yield here / tag, "its name does not end in the number of its step"
        return
    yield Candidate(_step(tag), Place(watched, path, tag), tag)
    for name in names:
        if name != tag and _is_tag(here / name) and _STEP.search(name) and _step(name) > _step(tag):
            yield here / name, f"`{LATEST}` names {tag} still"


def problem(names: Collection[str], files: Mapping[str, Path], world_size: int) -> str:
    """Why a checkpoint of these files is not whole; empty where it is.

    Args:
        names: of all nodes.
        files: this node's, by name; the chief's have what tells which others belong to them.
    """
    folders = {name.rpartition("/")[0] for name in names}
    for folder in sorted(folders):
        inside = {name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == folder}
        shards = Counter(match["of"] for name in inside if (match := _SHARD.fullmatch(name)))
        for kind, count in shards.items():
            if count != world_size:
                return f"{folder} has shards of the {_SHARDS[kind]} of {count} of {world_size} processes"
        if shards and "model" not in shards and not any(map(_WHOLE.fullmatch, inside)):
            return f"{folder} has no weights"
    for name, path in files.items():
        if path.name == METADATA:
            folder = name.rpartition("/")[0]
            if (shards_of := _shards_of(path)) is None:
                return f"{name} is cut off"
            needed = {f"{folder}/{shard}".lstrip("/") for shard in shards_of}
            if lacking := sorted(needed - set(names)):
                return f"{len(lacking)} of {len(needed)} files that {name} lists are missing, such as {lacking[0]}"
        if cut := _is_cut_off(path):
            return f"{name} is {cut}"
    return ""


def size_below(folder: Path) -> int:
    """Bytes of all files in and below the folder, by which it is noticed that they are still written."""
    total = 0
    for top, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(top, name)).st_size
    return total


def cut_off(files: Mapping[str, Path]) -> str:
    """The first of these files that has not been written to its end, and how that shows; empty for none."""
    return next((f"{name} is {cut}" for name, path in files.items() if (cut := _is_cut_off(path))), "")


def processes_of(names: Collection[str]) -> int:
    """Number of processes that a checkpoint can be resumed with; 0 for any."""
    matches = (_SHARD.fullmatch(name.rpartition("/")[2]) for name in names)
    return sum(match["of"] == "optim" for match in matches if match)


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(top, name)
            with contextlib.suppress(FileNotFoundError):  # it is being deleted
                if path.is_symlink() and (not path.exists() or path.is_dir()):
                    raise Unfit(f"{name} is a link to {'a folder' if path.exists() else 'nothing'}")
                mode = path.stat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise Unfit(f"{name} is no regular file")
                if stat.S_ISREG(mode):
                    yield path.relative_to(folder).as_posix(), path


def _tag(folder: Path, names: list[str]) -> str:
    """The folder that DeepSpeed's `latest` names; empty for a file of another program."""
    try:
        text = (folder / LATEST).read_bytes()[: MAX_TAG_BYTES + 1].decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text in names and _is_tag(folder / text) else ""


def _is_tag(folder: Path) -> bool:
    """Return whether DeepSpeed has written it."""
    with contextlib.suppress(OSError):
        return any(_SHARD.fullmatch(name) or _WHOLE.fullmatch(name) for name in os.listdir(folder))
    return False


def _dcp_folders(folder: Path) -> list[Path]:
    """Folders of torch.distributed.checkpoint in and below this one."""
    folders = []
    for top, _, files in os.walk(folder):
        if METADATA in files or any(name.endswith(".distcp") for name in files):
            folders.append(Path(top))
    return folders


def _step(name: str) -> int:
    match = _STEP.search(name)
    assert match
    return int(match[1])


def _shards_of(metadata: Path) -> set[str] | None:
    """Names of the files that a `.metadata` lists: the strings of the pickle, which is not loaded; None for half of
    one.
    """
    try:
        strings = {
            argument for _, argument, _ in pickletools.genops(metadata.read_bytes()) if isinstance(argument, str)
        }
    except ValueError:
        return None
    return {name for name in strings if name.endswith(".distcp")}


def _is_cut_off(path: Path) -> str:
    """How a file that torch.save or safetensors writes shows that its end is missing; empty for others."""
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == ZIP:
            return "" if zipfile.is_zipfile(path) else "cut off: its zip directory is missing"
        if path.suffix != SAFETENSORS:
            return ""
        length, size = int.from_bytes(start, "little"), path.stat().st_size
        if length > MAX_HEADER_BYTES:  # another program's files of that name
            return ""
        header = json_object(file.read(length))
        try:
            ends = [_end_of(entry) for name, entry in header.items() if name != "__metadata__"]
        except (KeyError, IndexError, TypeError, ValueError):  # another program's file of that name
            return ""
        return "" if header and size >= 8 + length + max(ends, default=0) else "cut off"


def _end_of(entry: object) -> int:
    """Where a tensor's bytes end after the header. Raises TypeError, LookupError or ValueError for another form."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list):
        raise TypeError(f"{entry!r} has no offsets")
    return int(offsets[1])
