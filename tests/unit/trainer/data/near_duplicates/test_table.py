"""Which images look like training images, by the table of a prepared data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlmpipe.trainer.data.near_duplicates import table as tables
from vlmpipe.trainer.data.near_duplicates.signature import SIGNATURE_BYTES
from vlmpipe.trainer.data.near_duplicates.table import NAME, SignatureWriter, like_train, validation_images
from vlmpipe.trainer.data.prepare.statistics import near_duplicates

SIGNATURES = [bytes(one) for one in np.random.default_rng(0).integers(0, 256, (60, SIGNATURE_BYTES), dtype=np.uint8)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Training images 0 to 49, of which 7 has no signature; validation images 45 to 54, of which 54 has none."""
    writer = SignatureWriter()
    for number in range(50):
        for identity in (f"t{number}", f"again{number}"):
            writer.add("train", identity, 1, f"sha-{number}", b"" if number == 7 else SIGNATURES[number])
    for number in range(45, 55):
        writer.add("eval", f"v{number}", 0, f"other-{number}", b"" if number == 54 else SIGNATURES[number])
    writer.write(tmp_path)
    return tmp_path / NAME


def test_validation_images_are_found_by_the_first_sample_that_has_the_image(table: Path) -> None:
    searched = {sha256: signature for sha256, (*_, signature) in validation_images(table).items()}
    result = like_train(table, searched)
    assert (result.images, result.without_signature, result.compared) == (9, 1, 1.0)
    assert result.nearest == {f"other-{number}": (f"t{number}", 1, 0) for number in range(45, 50)}
    assert [name for name, _ in result.closest()] == sorted(result.nearest)


def test_parts_of_a_large_search_add_up(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = {f"image-{number}": signature for number, signature in enumerate(SIGNATURES)}
    whole = like_train(table, searched)
    monkeypatch.setattr(tables, "MAX_SEARCHED", 7)
    assert like_train(table, searched).nearest == whole.nearest
    assert len(whole.nearest) == 49


def test_a_search_that_spends_its_comparisons_says_what_share_was_compared(table: Path) -> None:
    result = like_train(table, dict(zip("abc", SIGNATURES, strict=False)), max_comparisons=0)
    assert (result.images, result.compared, result.nearest) == (3, 0.0, {})


def test_no_training_image_leaves_nothing_to_compare(tmp_path: Path) -> None:
    writer = SignatureWriter()
    writer.add("eval", "v", 0, "sha", SIGNATURES[0])
    writer.write(tmp_path)
    assert like_train(tmp_path / NAME, {"sha": SIGNATURES[0]}).compared == 1.0


def test_of_many_validation_images_a_fixed_part_is_searched(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = validation_images(table)
    monkeypatch.setattr(tables, "MAX_VALIDATION_IMAGES", 3)
    assert validation_images(table) == {sha256: everything[sha256] for sha256 in sorted(everything)[:3]}
    assert near_duplicates(table, len(everything))["compared"] == pytest.approx(3 / len(everything))
