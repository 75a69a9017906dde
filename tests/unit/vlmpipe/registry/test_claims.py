"""Numbers of versions: requests that taking one needs, and claims that an attempt or an older vlmpipe left unnamed."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.registry.claims import Claims, Owner
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal

COUNTED = ("list", "stat", "read", "create", "write", "fetch", "delete")


class Counting(LocalStorage):
    """Counts its calls, by name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in COUNTED:
            self.calls[name] += 1
        return super().__getattribute__(name)


def claims(folder: Path) -> Claims:
    return Claims(LocalStorage(folder), "m")


def write_claim(folder: Path, number: int, run_id: str, checkpoint: str = "c") -> None:
    """As an earlier vlmpipe did, or an attempt that stopped before it named its claim."""
    LocalStorage(folder).create(f"m/versions/{number:06d}/CLAIM", seal({"run_id": run_id, "checkpoint": checkpoint}))


def test_a_number_is_taken_in_as_many_requests_whatever_versions_there_are(tmp_path: Path) -> None:
    taken: list[Counter[str]] = []
    for number in range(1, 8):
        store = Counting(tmp_path)
        assert Claims(store, "m").take(f"run-{number}", "c") == number
        taken.append(store.calls)
    assert taken[3] == taken[-1] and taken[-1]["read"] == 0 and taken[-1]["list"] == 1, taken[-1]
    again = Counting(tmp_path)
    assert Claims(again, "m").take("run-7", "c") == 7 and again.calls["read"] == again.calls["create"] == 0
    assert len(claims(tmp_path).taken()) == 7


@pytest.mark.parametrize("run_id", ["a", "A.b_c-1", "with/slash", "1-2-3", "0" * 128])
def test_a_claims_name_is_read_back(run_id: str, tmp_path: Path) -> None:
    assert claims(tmp_path).take(run_id, "") == 1
    assert claims(tmp_path).taken() == {1: Owner.of(run_id, "")}


# Numbers that are claimed, those of them whose claims have names, and the next free number.
KNOWN = [
    ((1, 2, 3), (), 4),
    ((1, 2, 3), (3,), 4),
    ((1, 2, 3), (1,), 4),
    ((1, 4), (4,), 5),  # the versions between were removed by hand
    ((1, 4), (), 5),
    ((2,), (), 3),
    ((1, 3, 4), (3,), 5),
]


@pytest.mark.parametrize(("numbers", "named", "free"), KNOWN)
def test_no_number_is_given_twice_whichever_claims_have_names(
    numbers: tuple[int, ...], named: tuple[int, ...], free: int, tmp_path: Path
) -> None:
    for number in numbers:
        write_claim(tmp_path, number, f"run-{number}")
    for number in named:
        name = f"m/claims/{number:06d}-run-{number}-{Owner.of('', 'c').checkpoint}"
        LocalStorage(tmp_path).create(name, b"")
    assert {number: owner.run_id for number, owner in claims(tmp_path).taken().items()} == {
        number: f"run-{number}" for number in numbers
    }
    assert [claims(tmp_path).take(f"run-{number}", "c") for number in (*numbers, 99)] == [*numbers, free]
    assert len(list((tmp_path / "m/claims").iterdir())) == len(numbers) + 1, "the first one named all"


def test_an_attempt_that_stops_while_it_names_claims_hides_none(tmp_path: Path) -> None:
    for number in (1, 2, 4):  # the third was removed by hand
        write_claim(tmp_path, number, f"run-{number}")

    class Stops(LocalStorage):
        def create(self, name: str, data: bytes) -> None:
            super().create(name, data)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Claims(Stops(tmp_path), "m").take("run-9", "c")
    assert len(list((tmp_path / "m/claims").iterdir())) == 1
    assert claims(tmp_path).take("run-1", "c") == 1 and claims(tmp_path).take("run-9", "c") == 5


def test_claims_without_names_are_read_and_named_side_by_side(tmp_path: Path) -> None:
    """A registry of an earlier vlmpipe may have thousands, each a request to a bucket to read and one to name."""
    for number in range(1, 6):
        write_claim(tmp_path, number, f"run-{number}")
    reads, creations = (threading.Barrier(2, timeout=30) for _ in range(2))

    class InPairs(LocalStorage):
        def read(self, name: str, max_bytes: int | None = None) -> bytes:
            if "000005" not in name:
                reads.wait()
            return super().read(name, max_bytes)

        def create(self, name: str, data: bytes) -> None:
            if "/claims/" in name and name[len("m/claims/") :][:6] < "000005":
                creations.wait()
            super().create(name, data)

    assert Claims(InPairs(tmp_path), "m").take("run-6", "c") == 6
    assert len(claims(tmp_path).taken()) == 6


def test_a_claim_that_another_attempt_has_just_made_is_seen_before_it_has_a_name(tmp_path: Path) -> None:
    claims(tmp_path).take("a", "c")
    write_claim(tmp_path, 2, "b")
    assert claims(tmp_path).take("b", "c") == 2 and claims(tmp_path).take("c", "c") == 3


def test_attempts_at_once_agree_on_one_number_a_checkpoint(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def take(run_id: str) -> int:
        barrier.wait()
        return claims(tmp_path).take(run_id, "c")

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(take, ["a", "b", "a", "b"]))
    assert numbers[:2] == numbers[2:] and sorted(numbers[:2]) == [1, 2]
