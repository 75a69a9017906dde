"""The folder of the start model's answers is named by what decides them, on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from vlmpipe.trainer.data.replay.place import _identity_of
from vlmpipe.trainer.storage import model_folders, open_storage

ADDRESS = "gs://bucket/models/llava"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        client = server.client()
        monkeypatch.setattr("vlmpipe.trainer.storage.gcs._default_client", lambda: client)
        yield server


@pytest.mark.usefixtures("bucket")
def test_weights_in_a_bucket_are_known_on_every_machine_until_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_storage(ADDRESS)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        store.write(name, b"{}")

    def on_machine(name: str) -> object:
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(model_folders, "_in_use", {})
        return _identity_of(ADDRESS, "")

    first = on_machine("one")
    assert on_machine("another") == first
    store.write("model.safetensors", b"[]")
    assert on_machine("one") != first
