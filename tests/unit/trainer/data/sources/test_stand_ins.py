"""A file that came in another's place, such as a pointer of Git LFS, is named for what it is, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.validation.checks import check_image
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sources import FILE_SUFFIXES, open_source
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.safetensors_header import read_header
from vlmpipe.trainer.storage.regular_files import STAND_INS

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0a" * 32 + b"\nsize 12345\n"
FILES = {
    "a pointer of Git LFS": LFS,
    "compressed by gzip": b"\x1f\x8b\x08\0" + bytes(range(60)),
    "a web page": b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>",
    "text in UTF-16": '[{"id": "a"}]\n'.encode("utf-16"),
}


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
@pytest.mark.parametrize("what", FILES)
def test_a_source_is_named_for_what_it_is(tmp_path: Path, what: str, suffix: str) -> None:
    (path := tmp_path / f"a{suffix}").write_bytes(FILES[what])
    with pytest.raises(DataError) as error:
        list(open_source(DataConfig(source=str(path), sequence_length=100)))
    assert what in error.value.found and str(path) in error.value.found and error.value.fix


@pytest.mark.parametrize("what", FILES)
def test_an_image_and_weights_are_too(tmp_path: Path, what: str) -> None:
    with pytest.raises(RejectedError, match=what):
        check_image(FILES[what], DataConfig(source="x", sequence_length=100))
    (path := tmp_path / "model.safetensors").write_bytes(FILES[what])
    with pytest.raises(DataError, match=what):
        read_header(path)


def test_no_start_hides_another() -> None:
    starts = list(STAND_INS)
    assert not [(one, other) for one in starts for other in starts if one != other and other.startswith(one)]
