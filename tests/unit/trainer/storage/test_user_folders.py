"""A user without a home: no HOME, and a number that /etc/passwd does not have."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.compile import cache_folder
from vlmpipe.trainer.preflight.node import check_node
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.user_folders import cache_of_user, expanded


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_caches_are_in_a_folder_that_only_the_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert cache_of_user() is None
    assert check_node(str(tmp_path), 0).line()
    assert cache_folder().parent == tmp_path


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("name", ["~/runs", "~somebody/runs"])
def test_a_path_of_the_home_is_refused_in_words(name: str) -> None:
    with pytest.raises(ConfigError, match="this user has no home"):
        expanded(name)
    with pytest.raises(ConfigError, match="this user has no home"):
        open_storage(name)


@pytest.mark.usefixtures("homeless")
def test_other_paths_need_no_home() -> None:
    assert expanded("runs/~x") == Path("runs/~x")
