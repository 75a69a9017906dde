"""Addresses of files: typing errors are refused, and never another place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.trainer.config.base import storage_uri

FIELDS = ("output.root_uri", "data.image_folder", "checkpoint.mirror_uri", "gcp.pipeline_root", "register.registry")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gs:/bucket/x", "expected gs://bucket/x"),
        ("C:\\data\\run", "expected a path of this system"),
        ("D:/data", "expected a path of this system"),
        ("\\\\server\\share", "expected a path of this system"),
        ("gs:bucket/x", "expected gs://bucket/x"),
        ("S3:/bucket", "expected s3://bucket"),
        ("file:/x/y", "expected file:///x/y"),
        ("https:/a.example.com/x", "expected https://a.example.com/x"),
        ("file://x/y", "expected file:///folder"),
        ("gs://b//x", "one slash between its parts"),
        ("gs://b/x//", "one slash between its parts"),
        ("gs://b/../x", r"no \. and \.\."),
        ("gs://b/x/.", r"no \. and \.\."),
        ("gs://b/x\n", "without line breaks"),
        ("/data/x\u2028", "without line breaks"),
        ("/data/x\x7f", "without line breaks"),
        (" gs://b/x", "without spaces at its ends"),
        ("gs://", "expected a local path, gs://bucket/path"),
        ("http://b/x", "expected a local path, gs://bucket/path"),
    ],
)
def test_an_address_that_would_be_another_place_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        storage_uri(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("file:///x/y", "/x/y"),
        ("runs", "runs"),
        ("../data/a b.json", "../data/a b.json"),
        ("/daten/größe/資料", "/daten/größe/資料"),
        ("gs://b", "gs://b"),
        ("gs://b/x/", "gs://b/x/"),
        ("s3://b/x y/*.parquet", "s3://b/x y/*.parquet"),
        ("liuhaotian/llava", "liuhaotian/llava"),
        ("builtin:digits", "builtin:digits"),
    ],
)
def test_an_address_is_taken_as_it_is(text: str, address: str) -> None:
    assert storage_uri(text) == address


@given(st.text(alphabet="ab/.:\n s", max_size=12).map(lambda text: f"gs://b/{text}"))
def test_an_accepted_address_in_a_bucket_has_one_name_for_each_part(text: str) -> None:
    try:
        parts = storage_uri(text).removesuffix("/").split("/")[3:]
    except ValueError:
        return
    assert all(part not in ("", ".", "..") and part.isprintable() for part in parts)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("text", ["gs:/bucket/x", "gs://b//x", '"gs://b/x\\n"'])
def test_every_address_of_the_run_file_is_read_so(field: str, text: str) -> None:
    with pytest.raises(RunFileError, match=field.replace(".", r"\.")):
        load_run_file(ROOT / "configs/digits.yaml", [f"{field}={text}"])


@pytest.mark.parametrize("part", ["tower", "language_model"])
def test_weights_are_addresses_too(part: str) -> None:
    with pytest.raises(RunFileError, match=rf"model\.{part}\.weights"):
        load_run_file(ROOT / "configs/digits.yaml", [f"model.{part}={{weights: 'gs:/bucket/model'}}"])
