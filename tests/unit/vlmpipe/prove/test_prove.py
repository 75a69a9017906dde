"""A proof that is stopped by Ctrl-C, and the same call again. Its laws are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vlmpipe.config.run_config import load_run_file
from vlmpipe.prove import prove as module
from vlmpipe.prove import tiny_model
from vlmpipe.prove.laws import LAWS, State, Verdict
from vlmpipe.prove.prove import DEFAULT_RUN_FILE, StoppedError, prove
from vlmpipe.trainer.errors import ConfigError, ExitCode


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the laws that are checked. Ctrl-C comes while the third is."""
    names: list[str] = []

    class Interrupted:
        def __init__(self, *_: object) -> None: ...

        def verdicts(self, asked: Sequence[str]) -> Iterator[Verdict]:
            for name in asked:
                names.append(name)
                if len(names) == 3:
                    raise KeyboardInterrupt
                state: State = "does not hold" if len(names) == 2 else "holds"
                yield Verdict(name, LAWS[name][0], state, "by so much")

    monkeypatch.setattr(module, "Proof", Interrupted)
    monkeypatch.setattr(tiny_model, "write_tiny_model", lambda *_: None)
    return names


def test_a_stopped_proof_continues_with_the_laws_that_were_not_found_to_hold(
    checked: list[str], tmp_path: Path
) -> None:
    config, folder = load_run_file(DEFAULT_RUN_FILE), tmp_path / "proven"
    with pytest.raises(StoppedError, match=f"2 of {len(LAWS)} laws are checked") as stopped:
        prove(config, folder)
    assert stopped.value.code == ExitCode.INTERRUPTED and f"--output {folder}" in stopped.value.fix
    assert not (folder / "prove.json").exists()
    with pytest.raises(ConfigError, match="of other settings"):
        prove(config, folder, limit_s=1.0)

    said: list[str] = []
    proven = prove(config, folder, reached=lambda verdict: said.append(verdict.law))
    first, second, *rest = LAWS
    assert checked == [first, second, rest[0], second, *rest]
    assert sorted(said) == sorted(LAWS) and [one.law for one in proven.verdicts] == list(LAWS)
    assert proven.broken == []
    assert [one["law"] for one in json.loads((folder / "prove.json").read_text())["laws"]] == list(LAWS)
    assert not (folder / module.UNFINISHED).exists()
    with pytest.raises(ConfigError, match="not empty"):
        prove(config, folder)


@pytest.mark.parametrize("changed", ["train.py", "model.py"])
def test_a_proof_of_a_program_that_has_changed_since_is_not_continued(
    changed: str, checked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "model.py"):
        Path(name).write_text("import model")
    own = "train.trainer={name: own, command: [python, train.py, --out, '{output}', --steps, '{train.max_steps}']}"
    config = load_run_file(DEFAULT_RUN_FILE, [own])
    with pytest.raises(StoppedError):
        prove(config, Path("proven"))
    Path(changed).write_text("raise SystemExit(1)")
    with pytest.raises(ConfigError, match="another program"):
        prove(config, Path("proven"))
    assert len(checked) == 3


def test_a_proof_that_found_nothing_yet_leaves_its_folder_to_any_other(tmp_path: Path) -> None:
    module._write_unfinished(tmp_path, {"limit_s": 1.0}, {})
    assert module._earlier(tmp_path, {"limit_s": 2.0}) == {}


@pytest.mark.parametrize("content", ["", "[1]", '{"left": 1}', '{"asked": {}, "laws": [{"law": "x"}]}'])
def test_a_file_of_the_same_name_lets_no_folder_be_removed(content: str, tmp_path: Path) -> None:
    (tmp_path / module.UNFINISHED).write_text(content)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="not empty"):
        module._earlier(tmp_path, {"limit_s": 1.0})
    assert (tmp_path / "model").is_dir()
