"""What workers of a test run share is what they would make by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.fork_server import python_with
from tests.support.paths import ROOT
from tests.support.trainer.preloaded import Preloaded
from tests.support.workers import rewrite_test_files, rewritten


def test_rewritten_files_are_where_pytest_looks_for_them(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert rewrite._read_pyc(Path(__file__), rewritten(Path(__file__))) is not None, "pytest has written that itself"
    paths = [tmp_path / f"test_{number}.py" for number in range(3)]
    for path in paths:
        path.write_text("def test_it():\n    assert 1 + 1 == 2\n", encoding="utf-8")
    rewrite_test_files(pytestconfig, paths)
    assert all(rewrite._read_pyc(path, rewritten(path)) is not None for path in paths)


def test_workers_fork_ranks_from_one_process_and_a_fork_that_is_killed_leaves_the_others(tmp_path: Path) -> None:
    output = tmp_path / "output"

    def end(worker: Preloaded, module: str) -> list[int]:
        rank = {"environment": dict(os.environ), "output": str(output)}
        return worker.run(module, [], [rank], timeout_s=60)

    first, second = Preloaded(), Preloaded()
    assert second._started is None, "the process is there already"
    assert end(first, "this") == end(second, "this") == [0]
    assert output.read_text(encoding="utf-8").count("Zen of Python") == 2
    first._kill_with_ranks()
    assert end(second, "no_such_module") == [1]
    assert end(second, "this") == [0]


@pytest.fixture
def python(tmp_path: Path) -> Iterator[list[str]]:
    """The command of a Python that is forked from a process with one module."""
    with python_with(tmp_path / "server", "colorsys") as command:
        yield command


def test_forked_python_has_the_files_folder_environment_and_arguments_of_its_starter(
    python: list[str], tmp_path: Path
) -> None:
    code = """
    import os, sys
    assert "colorsys" in sys.modules
    print(sys.stdin.read(), os.getcwd(), os.environ["KEY"], sys.argv, __name__, os.getsid(0) == os.getpid())
    print("an error", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
    """
    command = [*python, "-u", "-c", textwrap.dedent(code), "3"]
    started = {"env": {**os.environ, "KEY": "value"}, "cwd": tmp_path, "capture_output": True, "text": True}
    alone = subprocess.run(command, input="given", start_new_session=True, **started)  # type: ignore[call-overload]
    assert (alone.returncode, alone.stderr) == (3, "an error\n")
    assert alone.stdout == f"given {tmp_path} value ['-c', '3'] __main__ True\n"
    beside = subprocess.run(command, input="", **started)  # type: ignore[call-overload]
    assert beside.stdout.endswith("False\n"), "a fork in its starter's session gets the terminal's signals, too"


def test_signals_reach_the_forked_python_and_its_death_its_starter(python: list[str]) -> None:
    code = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print(os.getpid(), flush=True)\n"
    command = [*python, "-c", code + "while True: signal.pause()"]
    for number, ended in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
            assert started.stdout is not None
            fork = int(started.stdout.readline())
            os.kill(started.pid if number == signal.SIGTERM else fork, number)
            assert started.wait(60) == ended
            assert not Path(f"/proc/{fork}").exists()


def test_nothing_of_a_forked_python_is_left_when_its_starter_is_killed(python: list[str]) -> None:
    code = "import os, signal, time; [os.fork()]; print(os.getpid(), flush=True); time.sleep(600)"
    command = [*python, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        forks = [int(started.stdout.readline()) for _ in range(2)]
        ends = [os.pidfd_open(fork) for fork in forks]
        started.kill()
        assert started.stdout.read() == "", "which ends once both have ended"
    for end in ends:
        os.close(end)


def test_test_files_are_imported_once_and_a_worker_that_dies_is_reported_and_replaced(tmp_path: Path) -> None:
    conftest = """
    from tests.support.collected import fork_workers

    def pytest_xdist_setupnodes(config, specs):
        fork_workers(config, specs)
    """
    test = """
    import os, pathlib, signal, sys
    with pathlib.Path(__file__).with_name("imports").open("a") as imports:
        imports.write("imported ")

    def test_kills_its_worker():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_runs_in_a_worker():
        assert os.environ["PYTEST_XDIST_WORKER"] in ("gw0", "gw1", "gw2")
    """
    for name, text in (("conftest.py", conftest), ("test_it.py", test)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--import-mode=importlib", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "imports").read_text(encoding="utf-8") == "imported ", ended.stdout + ended.stderr
    assert "crashed while running 'test_it.py::test_kills_its_worker'" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_tests_run_where_xdist_is_not_installed() -> None:
    """As in the environments of `make test-versions`."""
    code = "import sys; sys.modules |= dict.fromkeys(('execnet', 'xdist')); import tests.conftest"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
