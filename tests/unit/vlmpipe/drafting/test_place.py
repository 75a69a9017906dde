"""Data of elsewhere is refused with what brings a part of it here."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.drafting.place import on_this_machine
from vlmpipe.trainer.errors import ConfigError


@pytest.mark.parametrize("place", ["photos", "~/photos", "a:b", "https", "C:/photos"])
def test_paths_are_of_this_machine(place: str) -> None:
    assert on_this_machine(place) == Path(place)


def test_an_address_of_a_file_is_a_path() -> None:
    assert on_this_machine("file:///data/my%20photos") == Path("/data/my photos")


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("gs://bucket/photos", "gcloud storage cp --recursive gs://bucket/photos sample"),
        ("s3://bucket/photos", "aws s3 cp --recursive s3://bucket/photos sample"),
        ("gs://bucket/my photos", "gcloud storage cp --recursive 'gs://bucket/my photos' sample"),
        ("https://example.com/set.json", "copy a part of it here; look at it"),
    ],
)
def test_an_address_is_refused_as_it_was_typed(place: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"--data is {place}, which is not on this machine") as refused:
        on_this_machine(place)
    assert fix in refused.value.fix and "data fetch" not in refused.value.fix
