"""A skill folder is written once; files of another content stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from vlmpipe.cli.skill.folder import write_folder
from vlmpipe.trainer.errors import ConfigError

FILES = {"SKILL.md": "the skill\n", "references/commands.md": "commands\n"}


def test_files_are_written_once_and_what_is_missing_is_added(tmp_path: Path) -> None:
    folder = tmp_path / "skills/vlmpipe"
    assert write_folder(folder, FILES) == [folder / name for name in FILES]
    assert {name: (folder / name).read_text() for name in FILES} == FILES
    (folder / "notes.md").write_text("the user's own")
    (folder / "SKILL.md").unlink()
    assert write_folder(folder, FILES) == [folder / "SKILL.md"]
    assert write_folder(folder, FILES) == []


@pytest.mark.parametrize("there", ["another text", "longer than the file is", "folder", "link"])
def test_another_content_is_refused_and_nothing_is_written(tmp_path: Path, there: str) -> None:
    path = tmp_path / "references/commands.md"
    path.parent.mkdir()
    if there == "folder":
        path.mkdir()
    elif there == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_text(there)
    with pytest.raises(ConfigError, match=r"another content\n  .*/references/commands.md"):
        write_folder(tmp_path, FILES)
    assert not (tmp_path / "SKILL.md").exists()


def test_the_command_writes_says_and_refuses(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("skill", "--output", str(tmp_path))
    page = tmp_path / "vlmpipe/SKILL.md"
    assert answer.code == 0 and f"{page} written" in answer.out
    assert "nothing was written" in vlmpipe("skill", "--output", str(tmp_path)).out
    page.write_text("mine")
    refused = vlmpipe("skill", "--output", str(tmp_path), "--json")
    assert refused.code == 64 and "another content" in refused.json["error"]["found"]
    assert page.read_text() == "mine"
