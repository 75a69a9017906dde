"""Every command that may take long, stopped by Ctrl-C at several moments, by one key press and by two, and continued.

It ends with its exit code and in words, leaves no process, no temporary file and no half of an output, and what it says
continues it does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from tests.support.terminal import VLMPIPE, Answer, Terminal
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import load_run_file
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.prove.laws import LAWS
from vlmpipe.rehearsal.serve import rehearsal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BETWEEN_PRESSES_S = 0.3
STOPPED = 130
RUN_FILE = merged(
    TINY,
    {
        "train.max_steps": 24,
        "train.epochs": 1000,
        "train.checkpoint_every_steps": 4,
        "evaluate.controls": [],
        "evaluate.max_samples": 8,
        "gate": "none",
        "model.family": "llava",
        "tune": {
            "metric": "exact_match",
            "goal": "MAXIMIZE",
            "max_trial_count": 2,
            "algorithm": "GRID_SEARCH",
            "parameters": {"train.optimizer.learning_rate": {"discrete_value_spec": {"values": [1e-3, 2e-3]}}},
        },
    },
)
VERTEX = ("gcp.project=my-project", "plan.confirm_above_usd=0")
LLAVA_7B = str(ROOT / "configs/llava-7b.yaml")

TWO_LAWS = [law for law in LAWS if law in ("labels", "accumulation")]  # each with starts of its own

Moment = Callable[[Path, Terminal], object]  # true once it has come


def shown(pattern: str) -> Moment:
    return lambda _folder, terminal: re.search(pattern, terminal.said)


def there(pattern: str) -> Moment:
    return lambda folder, _terminal: list(folder.glob(pattern))


def at_start(folder: Path, terminal: Terminal) -> bool:
    """The command line is being imported. Before that, in the first tenth of a second, Ctrl-C is Python's own."""
    return b"pydantic_core" in Path(f"/proc/{terminal.process.pid}/maps").read_bytes()


@dataclass(frozen=True)
class Case:
    """A command, the moments at which it is stopped, and what continues it."""

    arguments: Sequence[str]
    moments: Mapping[str, Moment]
    says: str = ""  # how to continue, after the first moment
    code: int = STOPPED
    again: Sequence[str] | None = None  # by default the same
    ends: bool = True  # by itself; else it is stopped where `running` comes
    running: Moment | None = None
    makes: str = ""  # appears when it is whole
    continues: str = ""  # what the continued command says
    program: str = VLMPIPE
    variables: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "run": Case(
        ("run", "tiny.yaml", "--run-id", "stopped"),
        {
            "preparing": there("runs/runs/stopped/steps/*.json"),
            "training": there("runs/runs/stopped/checkpoints/*/COMMIT"),
            "evaluating": there("runs/runs/stopped/steps/evaluate.json"),
        },
        says="vlmpipe run tiny.yaml",
        continues="Continuing run stopped",
    ),
    "tune": Case(
        ("tune", "tiny.yaml", "--from", "r1"),
        {
            "begun": shown(r"search tiny-tune-"),
            "first trial": there("runs/runs/tiny-tune-*/trial-1/checkpoints/*/COMMIT"),
            "second trial": there("runs/runs/tiny-tune-*/trial-2/checkpoints/*/COMMIT"),
        },
        says="the same command continues it",
        continues="continuing search",
    ),
    "prove": Case(
        ("prove", *(f"--law={law}" for law in TWO_LAWS), "--output", "proven"),
        {
            "first start": there("proven/outputs/runs/*"),
            "training": there("proven/outputs/runs/*/prove.log"),
            "second law": shown(f"{TWO_LAWS[0]}: holds"),
        },
        says="the same command continues",
        makes="proven/prove.json",
    ),
    "predict": Case(
        ("predict", "r1", "images", "--question", "what digit is this?", "--batch", "1", "--output", "answers.parquet"),
        {
            "loading": there("answers.parquet.partial"),
            "first answers": lambda folder, _: lines(folder / "answers.parquet.partial") > 2,
            "last answers": lambda folder, _: lines(folder / "answers.parquet.partial") > 20,
        },
        makes="answers.parquet",
    ),
    "serve": Case(
        ("serve", "r1", "--port", "0"),
        {"starting": at_start, "loading": shown("starting r1"), "serving": shown("answers at http")},
        ends=False,
        running=shown("answers at http"),
    ),
    "rehearse": Case(
        ("rehearse", LLAVA_7B, "gcp.project=my-project"),
        {"starting": at_start, "serving": shown("Ctrl-C ends it")},
        ends=False,
        running=shown("Ctrl-C ends it"),
    ),
    "submit": Case(
        ("submit", LLAVA_7B, *VERTEX, "--plain"),
        {"asking": shown(r"\[y/N\]"), "watching": shown("resolve-run: running")},
        again=("submit", LLAVA_7B, *VERTEX, "--yes", "--detach"),
    ),
    "gate": Case(("gate", str(ROOT / "configs/digits.yaml")), {"starting": at_start, "computing": shown(r"\.\.\.")}),
    "benchmark": Case(
        ("--only", "flops", "commands", "--quick", "--json", "figures.json"),
        {"first part": shown("flops")},
        says="--only flops commands measures them",
        program="import sys; from benchmarks.bench_planner import SUITE; sys.exit(SUITE.main(None))",
    ),
}  # fmt: skip
NEEDS_A_RUN = {"tune", "predict", "serve"}
SHORT = {"rehearse": ("serving",), "gate": ("starting",)}
CONTINUED = {"rehearse"}  # in the short form too
TRIED = [
    (name, moment, presses)
    for name, case in CASES.items()
    for moment in case.moments
    for presses in (1, 2)
    if WHOLE or (moment in SHORT.get(name, ()) and presses == 1)
]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is done."""
    folder = with_run_file(tmp_path_factory.mktemp("trained"))
    done = ended(folder, CASES["run"], ("run", "tiny.yaml", "--run-id", "r1"))
    assert done.code == 0, done.said
    return folder


def with_run_file(folder: Path) -> Path:
    (folder / "tiny.yaml").write_text(json.dumps(RUN_FILE))
    (folder / "images").mkdir()
    for number in range(30):
        Image.new("RGB", (40, 40), (8 * number, 0, 200)).save(folder / f"images/{number:02}.png")
    return folder


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.node.callspec.params["name"] not in NEEDS_A_RUN:
        return with_run_file(tmp_path)
    shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def variables(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """For submit, a service that listens."""
    with contextlib.ExitStack() as stack:
        found: dict[str, str] = {}
        if request.node.callspec.params["name"] == "submit":
            servers = stack.enter_context(rehearsal(load_run_file(LLAVA_7B, ["gcp.project=my-project"])))
            found = {**servers.environment, ENDPOINT_VARIABLE: servers.vertex.endpoint}
        yield found


def ended(folder: Path, case: Case, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> Answer:
    with Terminal(folder, *arguments, program=case.program, **(variables or {})) as terminal:
        if not case.ends:
            assert case.running
            running = case.running
            terminal.when(lambda: running(folder, terminal), deadline_s=600)
            terminal.press_ctrl_c()
        return terminal.answer(deadline_s=900)


@pytest.mark.parametrize(("name", "moment", "presses"), TRIED)
def test_a_command_is_stopped_in_words_and_continues(
    name: str, moment: str, presses: int, place: Path, variables: Mapping[str, str]
) -> None:
    if name == "serve" and importlib.util.find_spec("fastapi") is None:
        pytest.skip("the packages of the extra serving, as make test-whole has them")
    case = CASES[name]
    with Terminal(place, *case.arguments, program=case.program, **variables) as terminal:
        if moment == "watching":
            terminal.when(lambda: "[y/N]" in terminal.said, deadline_s=600)
            terminal.type("y\n")
        terminal.when(lambda: case.moments[moment](place, terminal), deadline_s=600)
        for _ in range(presses):
            terminal.press_ctrl_c()
            time.sleep(BETWEEN_PRESSES_S if presses > 1 else 0)
        stopped = terminal.answer(deadline_s=300)
    waits = case.running is not None and moment == "serving"
    # A second Ctrl-C may come while a server that was asked to end is still there.
    codes = {0} if waits and presses == 1 else {0, case.code} if waits else {case.code}
    if presses > 1:  # in the last moments of Python's end the signal ends it, which a shell shows as 130 too
        codes |= {-signal.SIGINT}
    assert stopped.code in codes, stopped.said
    assert not re.search(r"Traceback|Exception ignored|unexpected [A-Z]\w+Error", stopped.said), stopped.said
    assert not case.makes or not (place / case.makes).exists()
    if presses == 1 and moment != "starting":
        assert case.says in stopped.words, stopped.said
    if moment == "watching":
        assert "the run continues" in stopped.words and "--watch watches it again" in stopped.words

    if not WHOLE and name not in CONTINUED:
        return
    again = ended(place, case, case.again or case.arguments, variables)
    assert again.code == 0, again.said
    assert case.continues in again.words, again.said
    assert not case.makes or (place / case.makes).is_file()
    left = [str(path) for pattern in ("*.partial", "*.tmp", "unfinished.json") for path in place.rglob(pattern)]
    assert left == [], "nothing half-written"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_sigterm_ends_a_server_and_what_it_started(moment: str, trained: Path) -> None:
    """As `kill`, systemd or the stop of a container ask for it. Nothing is left: neither processes nor files."""
    pytest.importorskip("fastapi", reason="the packages of the extra serving, as make test-whole has them")
    case = CASES["serve"]
    with Terminal(trained, *case.arguments) as terminal:
        terminal.when(lambda: case.moments[moment](trained, terminal), deadline_s=600)
        terminal.process.terminate()
        stopped = terminal.answer(deadline_s=60)
    assert stopped.code == (0 if moment == "serving" else STOPPED), stopped.said
    assert not re.search(r"Traceback|Exception ignored|unexpected [A-Z]\w+Error", stopped.said), stopped.said
