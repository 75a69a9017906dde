"""One checkpoint's files from several nodes: the chief asks, every node uploads its own and a manifest, in any order.

<run>/trainer/SAVE.json                        what the chief asks for
<run>/trainer/checkpoints/<name>/node-N.json   a node's answer, written after its files; again once it has more

A node's answer may come before its program has written all: the chief counts files by the rules of their form.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmpipe.trainer.checkpoint.commit import FOLDER, upload_files
from vlmpipe.trainer.checkpoint.manifest import FileSums, manifest_of, read_manifest
from vlmpipe.trainer.errors import UserError, os_errors, print_warning
from vlmpipe.trainer.external.checkpoints.forms import Candidate, Place, Stamp, Unfit, cut_off, problem, stamps
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record, write_record

REQUEST = "SAVE.json"
LIMIT_S, STOPPING_LIMIT_S = 300.0, 30.0  # for the other nodes' files, from the request
# For the chief's last word, from the end of a node's program. One that failed ends the job, which must not wait long.
CLOSED_LIMIT_S, FAILED_LIMIT_S = 330.0, 10.0
POLL_S = 0.5


@dataclass
class Gathering:
    """A checkpoint that the chief has uploaded its files of, and asked the other nodes for theirs."""

    store: Storage
    name: str
    candidate: Candidate
    files: Mapping[str, Path]  # the chief's own, in the program's folders
    nodes: Sequence[int]
    began_s: float
    limit_s: float = LIMIT_S

    @classmethod
    def begin(
        cls,
        store: Storage,
        name: str,
        candidate: Candidate,
        files: Mapping[str, Path],
        nodes: Sequence[int],
        attempt: int,
    ) -> Gathering:
        """Ask. Files that the chief has are not asked for: other nodes may have others of the same name."""
        asked = {"attempt": attempt, "name": name, "place": asdict(candidate.place), "has": sorted(files)}
        write_record(store, REQUEST, asked)
        chiefs = {file: path for file, path in files.items() if not candidate.place.tag or "/" in file}
        return cls(store, name, candidate, chiefs, nodes, time.monotonic())

    @staticmethod
    def close(store: Storage, attempt: int) -> None:
        """Ask for nothing any more."""
        write_record(store, REQUEST, {"attempt": attempt, "name": ""})

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began_s >= self.limit_s

    def hurry(self, stopping: bool) -> None:
        """Shorten the limit where this machine is asked to stop."""
        if stopping:
            self.limit_s = min(self.limit_s, time.monotonic() - self.began_s + STOPPING_LIMIT_S, LIMIT_S)

    def lacks(self, folders: list[Path], world_size: int) -> str:
        """Return the first missing part of the checkpoint; empty once it is whole."""
        names, sums = set(self.files), dict[str, tuple[int, FileSums]]()
        for node in self.nodes:
            manifest = f"{FOLDER}/{self.name}/{manifest_of(node)}"
            if self.store.stat(manifest) is None:
                return f"node {node} has not given its files; its own log says why"
            for file, entry in read_manifest(self.store.read(manifest), manifest).items():
                other, known = sums.setdefault(file, (node, entry))
                if known != entry:
                    return f"nodes {other} and {node} have different files {file}"
                names.add(file)
        try:
            return problem(names, self.files, world_size)
        except OSError as error:  # deleted meanwhile
            return str(error)


class NodeParts:
    """The answers of a node that is not the chief."""

    def __init__(
        self, store: Storage, attempt: int | None, node: int, folders: Sequence[Path], *, key: bytes = b""
    ) -> None:
        """attempt: None for a replica that does not train, of which nothing is asked."""
        self._store, self._attempt, self._node, self._key = store, attempt, node, key
        self._folders = list(folders)
        self._version, self._asked = "", dict[str, object]()
        self._seen: tuple[str, tuple[Stamp, ...]] = ("", ())
        self._answered: tuple[str, tuple[Stamp, ...]] = ("", ())
        self._said: set[str] = set()

    def answer(self) -> bool:
        """Upload what the chief asks for, once it changes no more. Return whether more may be asked."""
        if self._attempt is None:
            return False
        try:
            return self._answer()
        except (UserError, Unfit) as error:
            if isinstance(error, UserError) and not error.passes:
                raise
            self._say(f"this node's files of a checkpoint are not copied: {error}")
        return True

    def close(self, *, failed: bool = False) -> None:
        """After the program's end: answer until the chief asks no more, or a time limit."""
        end_s = time.monotonic() + (FAILED_LIMIT_S if failed else CLOSED_LIMIT_S)
        while self.answer():
            if time.monotonic() >= end_s:
                return self._say("the first node has not said that it needs no more files")
            time.sleep(POLL_S)

    def _answer(self) -> bool:
        known = self._store.stat(REQUEST)
        if known and known.version != self._version:
            self._asked, self._version = read_record(self._store, REQUEST), known.version
        asked = self._asked
        if asked.get("attempt") != self._attempt:
            return True
        if not (name := str(asked["name"])):
            return False
        place = Place(**asked["place"])  # type: ignore[arg-type]
        files = {file: path for file, path in place.files(self._folders).items() if file not in asked["has"]}  # type: ignore[operator]
        now = name, stamps(files)
        unchanged, self._seen = self._seen == now, now
        if not unchanged or self._answered == now:
            return True
        with os_errors(f"reading {place.path}"):
            if why := cut_off(files):
                self._say(f"this node's files of a checkpoint are not copied yet: {why}")
                return True
            upload_files(self._store, name, self._node, files, key=self._key)
        self._answered = now
        if files:
            print(f"launcher: {len(files)} files of {place.tag or place.path} on node {self._node} copied", flush=True)
        return True

    def _say(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._said:
            print_warning(text)
        self._said.add(text)
