"""Damaged checkpoints: what the documentation says of the installed libraries, and of the commit protocol."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint.damage import DAMAGES, FELL_BACK, LIBRARIES, REFUSED, SILENT, Library, deepspeed, ours, stock


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize(("damage", "answer"), [("a flipped bit", SILENT), ("a missing file", REFUSED)])
@pytest.mark.filterwarnings("ignore")
def test_a_library_by_itself_and_under_our_protocol(library: Library, damage: str, answer: str) -> None:
    assert stock(library, DAMAGES[damage]) == answer
    assert ours(library, DAMAGES[damage]) == FELL_BACK


@pytest.mark.slow
def test_deepspeed_names_a_checkpoint_whose_save_was_cut_off() -> None:
    assert deepspeed() == {"a flipped bit": (SILENT, FELL_BACK), "a missing file": (REFUSED, FELL_BACK)}
