"""A job spec in the making: the API's fields, and where each value of the imported file went."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from vlmpipe.importing.findings import Ledger, Outcome, Path, path_text
from vlmpipe.job_spec.file import SpecFile
from vlmpipe.job_spec.read_forms import ReadPool, ReadSpec
from vlmpipe.job_spec.rules.fields import LenientReading, read_leniently
from vlmpipe.job_spec.schema import Reading, read_message, read_tuning_job, snake_case
from vlmpipe.job_spec.study import CHECKED
from vlmpipe.job_spec.worker_pools import POOLS


class Draft:
    """A message of the API in snake_case, with comments by path. Values stand in `at`, by their path in the file."""

    def __init__(
        self, ledger: Ledger, reading: Reading, spec: Mapping[str, object], leaves: Mapping[Path, Path]
    ) -> None:
        """leaves: values of the file, each with its path inside the message, in the file's names."""
        self.ledger, self.reading = ledger, reading
        self.spec: dict[str, object] = copy.deepcopy(dict(spec))
        self.comments: dict[Path, str] = {}
        self.at: dict[Path, Path] = {leaf: self._api_path(path) for leaf, path in leaves.items()}
        for leaf, path in self.at.items():
            ledger.note(leaf, Outcome.EXPRESSED, path_text(path))

    def _api_path(self, written: Path) -> Path:
        """The path in the API's names; from an unknown field on as written."""
        path: Path = ()
        for part in written:
            name = snake_case(part) if isinstance(part, str) else part
            known = isinstance(part, int) or self.reading.names.get((*path, name)) == part
            path = (*path, name if known else part)
        return path

    def leaves_at(self, path: Path) -> list[Path]:
        """Values of the file that stand at a path or below it; else those of the nearest value around it."""
        leaves = [leaf for leaf, place in self.at.items() if place[: len(path)] == path]
        return leaves or [leaf for leaf, place in self.at.items() if place and path[: len(place)] == place]

    def get(self, path: Path) -> Any:
        """The value at a path; None for none."""
        value: object = self.spec
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(str(part))
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def put(self, path: Path, value: object, reason: str, *, leaves: Iterable[Path] | None = None) -> None:
        """Set a value. `leaves` are values of the file that it comes from; by default those at the path."""
        *parents, last = path
        place: object = self.spec
        for number, part in enumerate(parents):
            if isinstance(place, dict):
                place = place.setdefault(str(part), [] if isinstance(path[number + 1], int) else {})
            elif isinstance(place, list) and isinstance(part, int):
                place = place[part]
        if isinstance(place, list) and isinstance(last, int):
            place[last] = value
        else:
            assert isinstance(place, dict), f"{path_text(path)} lies in a value"
            place[last] = value
        for leaf in self.leaves_at(path) if leaves is None else leaves:
            self.at[leaf] = path
            self.ledger.note(leaf, Outcome.CHANGED, path_text(path), reason)
        self.comment(path, reason)

    def comment(self, path: Path, reason: str) -> None:
        """Add to the comment before a value."""
        if reason and reason not in self.comments.get(path, ""):
            self.comments[path] = "; ".join(filter(None, (self.comments.get(path), reason)))

    def remove(self, path: Path, outcome: Outcome, reason: str) -> bool:
        """Take a value out. Returns whether there was one."""
        *parents, last = path
        place = self.get(tuple(parents))
        leaves = self.leaves_at(path)
        if isinstance(place, dict) and last in place:
            del place[last]
        elif isinstance(place, list) and isinstance(last, int) and last < len(place):
            del place[last]
            self._renumber(tuple(parents), {old: old - 1 for old in range(last + 1, len(place) + 1)}, gone=last)
        else:
            return False
        for leaf in leaves:
            self.ledger.note(leaf, outcome, "", reason)
            self.at.pop(leaf, None)
        if not leaves:
            self.comment(tuple(parents), reason)
        return True

    def arrange_pools(self, order: Sequence[tuple[int | None, ReadPool]]) -> None:
        """Put the pools in another order. Each is given with its old index, or None for a new one."""
        moves = {old: new for new, (old, _) in enumerate(order) if old is not None}
        self._renumber((POOLS,), moves)
        self.spec[POOLS] = [pool for _, pool in order]

    def _renumber(self, parents: Path, moves: Mapping[int, int], gone: int | None = None) -> None:
        depth = len(parents)

        def moved(path: Path) -> Path:
            index = path[depth] if path[:depth] == parents and len(path) > depth else None
            if not isinstance(index, int):
                return path
            return (*parents, moves.get(index, index), *path[depth + 1 :])

        inside = (*parents, gone)
        self.comments = {
            moved(path): text for path, text in self.comments.items() if gone is None or path[: depth + 1] != inside
        }
        self.at = {leaf: path if path[: depth + 1] == inside else moved(path) for leaf, path in self.at.items()}


class SpecDraft(Draft):
    """A CustomJobSpec in the making."""

    def __init__(self, file: SpecFile, ledger: Ledger) -> None:
        self.file = file
        self.lenient: LenientReading = read_leniently(file.content, file.spelling)
        root: Path = (file.root,) if file.root else ()
        inside: Path = (POOLS,) if file.form == "pools" else ()
        leaves = {leaf: (*inside, *leaf[len(root) :]) for leaf in ledger.below(root)}
        super().__init__(ledger, read_message(file.content, spelling=file.spelling), dict(self.lenient.spec), leaves)

    @property
    def typed(self) -> ReadSpec:
        """The spec by the API's types, which the reader and the repairs keep."""
        return cast("ReadSpec", self.spec)

    @property
    def pools(self) -> list[ReadPool]:
        return self.typed.setdefault("worker_pool_specs", [])


class StudyDraft(Draft):
    """The study and the counts of a HyperparameterTuningJob in the making."""

    def __init__(self, file: SpecFile, ledger: Ledger) -> None:
        study = {name: value for name, value in file.study.items() if snake_case(name) in CHECKED}
        reading = read_tuning_job(study, file.spelling)
        leaves = {leaf: leaf for name in study for leaf in ledger.below((name,))}
        super().__init__(
            ledger, reading, {name: _with_whole_numbers(value) for name, value in reading.fields.items()}, leaves
        )


def _with_whole_numbers(value: object) -> object:
    """4 for 4.0, as it was probably written: the API's numbers are all real."""
    if isinstance(value, Mapping):
        return {name: _with_whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
