"""Claims of a model's version numbers by checkpoints of runs.

    <root>/<model>/versions/000001/CLAIM               the run and checkpoint of this number; create-only
    <root>/<model>/claims/000001-<run id>-<digest>     the same as a name, the checkpoint as a digest

Names are listed by 1,000 in a request, so that no request a version is needed. A claim without its name, of an attempt
that stopped in between or of an earlier vlmpipe, is read, and named by the next registration.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage
from vlmpipe.trainer.storage.records import read_record, seal
from vlmpipe.trainer.storage.transfer import in_parallel

THREADS = 16  # for claims of a registry without names: each waits for a bucket's answer, and holds no memory
NAME = re.compile(r"(?P<number>\d{6,})-(?P<run_id>.+)-(?P<digest>[0-9a-f]{16})")


class Owner(NamedTuple):
    """Owner of a version number. checkpoint: a digest of its name."""

    run_id: str
    checkpoint: str

    @classmethod
    def of(cls, run_id: str, checkpoint: str) -> Owner:
        return cls(run_id, hashlib.sha256(checkpoint.encode()).hexdigest()[:16])


class Claims:
    """The claims of one model in a registry."""

    def __init__(self, store: Storage, folder: str) -> None:
        self._store, self._folder = store, folder

    def take(self, run_id: str, checkpoint: str) -> int:
        """The number of this checkpoint: the one that was claimed for it before, or the next free one."""
        claimant = Owner.of(run_id, checkpoint)
        claim = seal({"run_id": run_id, "checkpoint": checkpoint})
        while True:
            named = self._named()
            unnamed = self._unnamed(named)
            self._name_all(unnamed)
            taken = named | unnamed
            if number := next((number for number, owner in taken.items() if owner == claimant), 0):
                return number
            number = max(taken, default=0) + 1
            try:
                self._store.create(self._claim(number), claim)
            except AlreadyExistsError:
                continue  # another run was faster: try the next number
            self._name(number, claimant)
            return number

    def taken(self) -> Mapping[int, Owner]:
        """The numbers that are taken, also of registrations that are under way."""
        named = self._named()
        return named | self._unnamed(named)

    def _named(self) -> dict[int, Owner]:
        names = (info.name.rpartition("/")[2] for info in self._store.list(f"{self._folder}/claims"))
        matches = filter(None, map(NAME.fullmatch, names))
        return {int(result["number"]): Owner(unquote(result["run_id"]), result["digest"]) for result in matches}

    def _unnamed(self, named: Mapping[int, Owner]) -> dict[int, Owner]:
        """Claims without a name: any of a registry without names, else those between the named ones and after them."""
        if not named:
            objects = self._store.list(f"{self._folder}/versions")
            return self._owners({_number(info.name): info.name for info in objects if info.name.endswith("/CLAIM")})
        last = max(named)
        between = sorted(set(range(1, last)) - named.keys())
        result = {number: self._claim(number) for number in between if self._store.stat(self._claim(number))}
        while self._store.stat(self._claim(last := last + 1)):
            result[last] = self._claim(last)
        return self._owners(result)

    def _name_all(self, claims: Mapping[int, Owner]) -> None:
        """Name the newest first: an attempt that stops leaves older ones alone, which are then seen to be missing."""
        if claims:
            *older, newest = sorted(claims)
            self._name(newest, claims[newest])
            for _ in in_parallel(lambda number: self._name(number, claims[number]), older, threads=THREADS):
                pass

    def _owners(self, names: Mapping[int, str]) -> dict[int, Owner]:
        return dict(zip(names, in_parallel(self._owner, names.values(), threads=THREADS), strict=True))

    def _owner(self, name: str) -> Owner:
        record = read_record(self._store, name)
        return Owner.of(str(record.get("run_id", "")), str(record.get("checkpoint", "")))

    def _claim(self, number: int) -> str:
        return f"{self._folder}/versions/{number:06d}/CLAIM"

    def _name(self, number: int, owner: Owner) -> None:
        run_id = quote(owner.run_id, safe="")
        with contextlib.suppress(AlreadyExistsError):  # another attempt has seen the claim, too
            self._store.create(f"{self._folder}/claims/{number:06d}-{run_id}-{owner.checkpoint}", b"")


def _number(name: str) -> int:
    """The version number in an object's name, `<model>/versions/000012/CLAIM`."""
    return int(name.split("/versions/")[1].partition("/")[0])
