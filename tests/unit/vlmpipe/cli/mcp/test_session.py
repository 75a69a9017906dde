"""Tools of a start of the server, and calls that it refuses before any command runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from vlmpipe.cli.app import app
from vlmpipe.cli.mcp import session as sessions
from vlmpipe.cli.mcp.calls import Calls
from vlmpipe.cli.mcp.session import Session, Settings
from vlmpipe.cli.skill.effects import Effect, load_effects
from vlmpipe.planner.spending.ledger import enter
from vlmpipe.trainer.errors import ExitCode, UserError

PROGRAM = typer.Context(typer.main.get_command(app), info_name="vlmpipe")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "root"
    root.mkdir()
    (root / "way-out").symlink_to(tmp_path)
    return Settings(root, 0.0, 0.0, (), (), None, 1.0, True)


@pytest.fixture
def session(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    def start(*_: object) -> None:
        raise AssertionError("a command was started")

    monkeypatch.setattr(Calls, "start", start)
    monkeypatch.setattr(sessions, "abi", lambda: 7)
    session = Session(PROGRAM, settings)
    yield session
    session.close()


def refusal(settings: Settings) -> UserError:
    with pytest.raises(UserError) as caught:
        Session(PROGRAM, settings)
    return caught.value


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("check", {"config": "/etc/passwd"}),
        ("check", {"config": "../run.yaml"}),
        ("check", {"config": "way-out/run.yaml"}),
        ("plan", {"config": "~/run.yaml"}),
        ("check", {"config": "r.yaml", "overrides": ["data.source=/etc/passwd"]}),
        ("run", {"config": "r.yaml", "overrides": ["output.root_uri=gs://others/runs"]}),
        ("init", {"data": "photos", "output": "../r.yaml"}),
        ("status", {"run": "@last", "root": "/"}),
        ("status", {"run": "gs://others/runs/x"}),
        ("compare", {"runs": ["one", "../../two"]}),
        ("logs", {"run": "file:///var/log"}),
        ("predict", {"run": "@last", "source": "/home", "question": "what?"}),
        ("data_convert", {"uri": "s3://others/prepared/x"}),
        ("data_fetch", {"name": "team/data", "output": "/tmp/data"}),
        ("submit", {"job_spec": "/etc/passwd"}),
    ],
)
def test_a_place_outside_is_refused_before_a_command_runs(
    session: Session, tool: str, given: dict[str, object]
) -> None:
    answer = session.call(tool, given).document()
    error: Any = answer["error"]
    assert (answer["ok"], answer["exit_code"]) == (False, ExitCode.NO_PERMISSION)
    assert error["found"] and error["expected"] and error["fix"]


@pytest.mark.parametrize(
    "tool",
    [
        "runs_rm",
        "runs_prune",
        "publish",
        "cancel",
        "schedule_delete",
        "serve",
        "chat",
        "rehearse",
        "prove",
        "mcp",
        "sh",
    ],
)
def test_a_command_that_is_no_tool_is_refused(session: Session, tool: str) -> None:
    answer = session.call(tool, {})
    assert answer.exit_code == ExitCode.CONFIG
    assert f"no tool '{tool}'" in str(answer.error)


def test_tools_are_commands_of_the_table_with_hints_by_their_effect(session: Session) -> None:
    tools = {tool.name: tool for tool in session.tools()}
    effects = {name.replace(" ", "_"): entry.effect for name, entry in load_effects().items()}
    assert {"init", "check", "plan", "run", "status", "diagnose", "compare", "submit"} <= tools.keys()
    for name in tools.keys() & effects.keys():
        assert tools[name].is_read_only == (effects[name] == Effect.reads)
    assert "spends" not in {effects[name] for name in tools if tools[name].is_read_only and name in effects}


def test_a_command_that_changes_a_service_is_a_tool_where_it_is_allowed(settings: Settings) -> None:
    session = Session(PROGRAM, dataclasses.replace(settings, allowed=("cancel", "schedule pause")))
    assert {"cancel", "schedule_pause"} <= {tool.name for tool in session.tools()}
    session.close()
    for never in ("runs rm", "submit", "serve", "nothing"):
        assert "--allow" in refusal(dataclasses.replace(settings, allowed=(never,))).found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"root": Path("/not/there")}, "is no folder"),
        ({"max_usd_per_call": 5.0}, "--max-usd-per-call 5 is more than --max-usd 0"),
        ({"addresses": ("my-bucket",)}, "has no scheme"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Settings, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(dataclasses.replace(settings, **changes)).found


def test_a_ledger_that_the_client_could_write_is_refused(settings: Settings) -> None:
    assert "below --root" in refusal(dataclasses.replace(settings, ledger=settings.root / "ledger")).found
    assert "below --root" in refusal(dataclasses.replace(settings, ledger=settings.root / "x/../ledger")).found


def test_without_landlock_the_server_starts_only_where_it_is_told_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "abi", lambda: 0)
    assert "--without-landlock" in refusal(settings).fix
    session = Session(PROGRAM, dataclasses.replace(settings, is_enforced=False))
    assert "kernel does not hold files" in session.instructions
    session.close()


def test_a_kept_ledger_counts_what_an_earlier_start_approved(settings: Settings, tmp_path: Path) -> None:
    kept = dataclasses.replace(settings, max_usd_per_call=5.0, max_usd=8.0, ledger=tmp_path / "ledger")
    first = Session(PROGRAM, kept)
    enter(first.limits, "run", 5.0, "")
    first.close()
    later = Session(PROGRAM, kept)
    limits: Any = later.call("limits", {}).result
    assert (limits["usd_approved"], limits["usd_in_all"]) == (5.0, 8.0)
    later.close()


def test_the_sessions_folder_goes_with_it(session: Session) -> None:
    folder = Path(session.limits.ledger).parent
    assert folder.is_dir() and os.stat(folder).st_mode & 0o077 == 0
    session.close()
    assert not folder.exists()
