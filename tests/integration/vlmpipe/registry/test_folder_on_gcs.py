"""The registry over the Cloud Storage client: preconditions instead of links and locks keep the same promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.gcs import QUICK_RETRY
from vlmpipe.registry import folder as registry_module
from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

ROOT = "gs://bucket/some/root/registry"


@pytest.fixture
def on_fake_gcs(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))

    def open_storage(uri: str) -> Storage:
        if uri.startswith("gs://"):
            return GcsStorage(uri, client=gcs_server.client(), retry=QUICK_RETRY)
        return LocalStorage(uri)

    monkeypatch.setattr(registry_module, "open_storage", open_storage)


def export_of(folder: Path, run_id: str) -> Path:
    export = folder / run_id
    export.mkdir()
    (export / "config.json").write_text(f'{{"run": "{run_id}"}}')
    return export


def register(export: Path, run_id: str) -> int:
    candidate = Candidate(run_id=run_id, export_uri=str(export), metrics={"exact_match": 0.5})
    return FolderRegistry(ROOT).register("model", candidate, "# card").version


@pytest.mark.usefixtures("on_fake_gcs")
def test_concurrent_registrations_and_promotions_keep_their_promises(tmp_path: Path) -> None:
    runs = ["a", "b", "c", "a", "b", "c"]
    exports = {run_id: export_of(tmp_path, run_id) for run_id in set(runs)}
    with ThreadPoolExecutor(6) as workers:
        numbers = list(workers.map(lambda run_id: register(exports[run_id], run_id), runs))
    assert sorted(set(numbers)) == [1, 2, 3]
    assert numbers[:3] == numbers[3:]

    registry = FolderRegistry(ROOT)
    assert [entry.version for entry in registry.versions("model")] == [1, 2, 3]
    registry.promote("model", 1, instead_of=None)
    registry.promote("model", 2, instead_of=1)
    with pytest.raises(UserError, match="another run was faster"):
        registry.promote("model", 3, instead_of=1)
    champion = registry.champion("model")
    assert champion is not None
    assert champion.version == 2
    assert champion.model_uri == f"{ROOT}/model/versions/000002/model"
