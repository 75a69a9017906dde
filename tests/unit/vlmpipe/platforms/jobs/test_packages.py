"""Packages of this machine: folders are built, and for Vertex AI files get addresses that name their content."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.paths import ROOT
from tests.support.pipelines.run_files import small
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.platforms.jobs.packages import built, packaged, upload
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage

PROJECT = str(ROOT / "recipes/plain")


@pytest.fixture(autouse=True)
def _cache_without_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's way to say that it is on: setuptools is here


def with_packages(*uris: str, module: str = "train") -> RunConfig:
    trainer = {
        "name": "mine", "kind": "package", "package_uris": uris, "executor_image_uri": "e:1", "python_module": module
    }  # fmt: skip
    return small(train__trainer=trainer, gcp={"pipeline_root": "gs://example-bucket/root"})


def test_a_folder_is_built_into_a_wheel_and_stays_as_it_was() -> None:
    before = sorted(Path(PROJECT).iterdir())
    wheel = built(PROJECT)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("train.py") == Path(PROJECT, "train.py").read_bytes()
    assert sorted(Path(PROJECT).iterdir()) == before
    assert wheel == built(PROJECT), "the same sources give the same bytes"


def test_a_folder_that_is_no_project_or_cannot_be_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no pyproject\.toml"):
        built(str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'absent_backend'\n")
    with pytest.raises(UserError, match="cannot be built") as caught:
        built(str(tmp_path))
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_packages_are_uploaded_once_and_the_job_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "mine-1.0-py3-none-any.whl").touch()
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("train.py", "")
    given = with_packages("gs://b/vlmpipe.whl", str(package))
    with pytest.raises(RunFileError, match="`vlmpipe submit` builds and uploads them"):
        require_vertex(given)
    config, files = packaged(given)
    assert config.train.trainer
    (first, second) = config.train.trainer.package_uris
    assert first == "gs://b/vlmpipe.whl" and list(files) == [second]
    assert second.startswith("gs://example-bucket/root/packages/") and second.endswith(f"/{package.name}")
    with FakeGcs(buckets=["example-bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        upload(files)
        store = open_storage(second.rpartition("/")[0])
        assert store.read(package.name) == package.read_bytes()
        version = store.stat(package.name)
        upload(files)
        assert store.stat(package.name) == version


def test_a_built_package_without_the_module_is_refused(tmp_path: Path) -> None:
    (package := tmp_path / "mine-1.0-py3-none-any.whl").touch()
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("other.py", "")
    with pytest.raises(ConfigError, match="no package of package_uris has train"):
        packaged(with_packages(str(package)))


def test_a_run_file_without_packages_is_left_alone() -> None:
    config = small()
    assert packaged(config) == (config, {})
