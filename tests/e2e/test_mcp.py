"""A scripted agent drives `vlmpipe mcp` with the official client, with mistakes on the way, some of them attacks."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from PIL import Image, ImageDraw

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.config.run_config import load_run_file
from vlmpipe.rehearsal.serve import rehearsal
from vlmpipe.trainer.confinement.landlock import MIN_ABI, abi

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(abi() < MIN_ABI, reason="this kernel has no Landlock"),
    pytest.mark.skipif(
        not WHOLE and importlib.util.find_spec("mcp") is None,
        reason="mcp is not installed (the extra mcp, which make install-dev has)",
    ),
]
Tool = Callable[..., Awaitable[dict[str, Any]]]
SECRET = "only the person may read this"
SUBMITTED = "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
COLOURS = ("red", "green", "blue")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of images for each answer, beside what an agent may not see, and with links that lead there."""
    (tmp_path / "private.yaml").write_text(f"name: private\nsecret: {SECRET}\n")
    root = tmp_path / "root"
    for colour in COLOURS:
        (root / "photos" / colour).mkdir(parents=True)
        for index in range(80):
            draw = random.Random(f"{colour} {index}")
            image = Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3))  # else they look alike
            left, top = draw.randrange(12), draw.randrange(12)
            ImageDraw.Draw(image).rectangle((left, top, left + 18, top + 18), fill=colour)
            image.save(root / "photos" / colour / f"{index}.png")
    (root / "link.yaml").symlink_to(tmp_path / "private.yaml")
    (root / "way-out").symlink_to(tmp_path)
    (root / "labels.csv").write_text("file_name,question,labl\nred/0.png,Which colour?,red\n")
    (root / "mine.py").write_text("open('/tmp/ran', 'w')\ndef records():\n    yield {}\n")
    return root


@asynccontextmanager
async def server(root: Path, *options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Tool]:
    """The server as a client starts it, and a function that calls a tool and waits for its answer."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    arguments = ["-P", "-m", "vlmpipe", "mcp", "--root", str(root), "--wait", "600", *options]
    variables = {"HOME": str(root.parent / "home"), "PYTHONPATH": str(ROOT), **(env or {})}
    parameters = StdioServerParameters(command=sys.executable, args=arguments, cwd=root, env=variables)
    async with Client(stdio_client(parameters)) as client:

        async def call(tool: str, **given: object) -> dict[str, Any]:
            answer = await client.call_tool(tool, given)
            document = answer.structured_content
            assert isinstance(document, dict) and answer.is_error == (not document["ok"])
            assert SECRET not in str(document) and "Traceback" not in str(document)
            return document

        yield call


def failed(document: Mapping[str, Any], *parts: str) -> None:
    """An error with its exit code and a sentence that has these parts."""
    error = document["error"]
    assert not document["ok"] and document["exit_code"] == error["exit_code"]
    for part in parts:
        assert part in str(error), (part, error)


# Mistakes that are refused before a command runs.
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("check", {"config": "../private.yaml"}, "outside the root"),
    ("check", {"config": "link.yaml"}, "outside the root"),
    ("check", {"config": "way-out/private.yaml"}, "outside the root"),
    ("plan", {"config": "/etc/passwd"}, "outside the root"),
    ("init", {"data": "photos", "output": "/tmp/mine.yaml"}, "outside the root"),
    ("init", {"data": "way-out"}, "outside the root"),
    ("status", {"run": "gs://others/runs/x"}, "does not list"),
    ("run", {"config": "photos.yaml", "overrides": ["output.root_uri=../runs"]}, "outside the root"),
    ("run", {"config": "photos.yaml", "yes": True}, "no parameter 'yes'"),
    ("submit", {"config": "photos.yaml", "overrides": ["--yes"]}, "begin with a dash"),
    ("runs_rm", {"runs": ["@last"]}, "no tool 'runs_rm'"),
    ("plan", {"configuration": "photos.yaml"}, "no parameter 'configuration'"),
]


async def make_mistakes(root: Path, call: Tool) -> None:
    """Mistakes of which some reach a command."""
    for tool, given, said in REFUSED:
        failed(await call(tool, **given), said)
    failed(await call("check", config="photos.yaml", overrides=["train.epochz=2"]), "train.epochz", "train.epochs")
    text = (root / "photos.yaml").read_text()
    (root / "leads-out.yaml").write_text(
        re.sub(r"^  source: .*$", "  source: ../private.yaml", text, flags=re.MULTILINE)
    )
    failed(await call("check", config="leads-out.yaml"), "data.source", "outside the root")


def test_mistakes_of_an_agent_are_answers_and_none_leads_out(root: Path) -> None:
    async def drive() -> None:
        async with server(root) as call:
            written = await call("init", template="digits", output="photos.yaml")
            assert written["ok"] and (root / "photos.yaml").is_file()
            await make_mistakes(root, call)
            limits = (await call("limits"))["result"]
            assert (limits["usd_in_all"], limits["approved"], limits["running_calls"]) == (0, [], [])

    anyio.run(drive)
    assert not Path("/tmp/mine.yaml").exists()


@pytest.mark.slow
def test_an_agent_goes_from_a_folder_of_images_to_a_registered_model(root: Path) -> None:
    async def drive() -> None:
        async with server(root) as call:
            failed(await call("init", data="pictures"), "pictures")  # a folder that is not there
            assert (await call("init", data="photos", output="photos.yaml"))["ok"]
            await make_mistakes(root, call)
            await make_mistakes_in_the_data(call)
            assert (await call("check", config="photos.yaml"))["result"]["ok"]
            assert (await call("plan", config="photos.yaml", target="local"))["result"]["state"] != "red"
            failed(await call("submit", config="photos.yaml"), "")  # names no service
            # So many questions that the gate may decide.
            ran = await call("run", config="photos.yaml", overrides=["data.validation_fraction=0.3", "train.epochs=12"])
            while ran["result"].get("running"):
                ran = await call("wait", call=ran["result"]["call"], seconds=600)
            assert ran["result"]["decision"]["accepted"], ran["result"]["decision"]
            assert ran["result"]["registered"]["version"] == 1
            assert (await call("status"))["result"]["outcome"] == "done"
            assert (await call("diagnose", run="@last"))["result"]["outcome"] == "done"
            failed(await call("compare", runs=["photos@champion", "nobody"]), "nobody")
            assert (await call("compare", runs=["photos@champion", "@last"]))["ok"]
            asked = await call("ask", run="@last", image="photos/red/0.png", question="What is in the picture?")
            assert asked["result"]["answers"][0]["prediction"] == "red"

    anyio.run(drive)
    assert not Path("/tmp/ran").exists()


async def make_mistakes_in_the_data(call: Tool) -> None:
    for override, said in [
        ("data.source=labels.csv", "answer"),  # its column is called labl
        ("data.image_folder=fotos", "fotos"),
        ("data.validation_fraction=1.5", "data.validation_fraction"),
        ("train.strategy=warp", "train.strategy"),
        ("data.source=mine.py:records", "code"),
        ("train.wandb.project=mine", "api.wandb.ai"),
    ]:
        answer = await call("check", config="photos.yaml", overrides=[override])
        assert not answer["ok"] and said in str(answer), (override, answer)


@pytest.mark.slow
def test_an_agent_is_stopped_at_the_cap_of_a_call_and_of_all(root: Path) -> None:
    overrides = ["gcp.project=test-project", "plan.confirm_above_usd=1000000"]
    config = load_run_file(ROOT / SUBMITTED, overrides)
    (root / "llava.yaml").write_text((ROOT / SUBMITTED).read_text())

    async def drive(options: list[str], env: Mapping[str, str]) -> list[dict[str, Any]]:
        async with server(root, *options, env=env) as call:
            planned = await call("submit", config="llava.yaml", overrides=overrides, dry_run=True)
            assert planned["result"]["sent"] is False
            for _ in range(2):
                await call("submit", config="llava.yaml", overrides=overrides)
            return [planned, await call("submit", config="llava.yaml", overrides=overrides), await call("limits")]

    with rehearsal(config) as services:
        env = {**services.environment, "VLMPIPE_VERTEX_ENDPOINT": services.vertex.endpoint}
        address = ["--address", "gs://example-bucket"]
        planned, answer, limits = anyio.run(drive, [*address, "--max-usd-per-call", "1", "--max-usd", "1"], env)
        failed(answer, "more than a call may")
        assert services.vertex.jobs == {} and limits["result"]["usd_approved"] == 0
        cap = str(planned["result"]["plan"]["usd"] * 3)
        ledger = ["--max-usd-per-call", cap, "--max-usd", cap, "--ledger", str(root.parent / "ledger")]
        _, answer, limits = anyio.run(drive, [*address, *ledger], env)
        failed(answer, "together is more than all calls may")
        assert 0 < len(services.vertex.jobs) <= 2
        assert 0 < limits["result"]["usd_approved"] <= float(cap)
