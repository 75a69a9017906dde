"""What is started for each launch, what it is told, and whom a request to stop is sent."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer.checkpoint.staging import program_folder
from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.distributed.cluster_env import Cluster, Roles
from vlmpipe.trainer.external.process import Node, TrainerProcess, command_line, environment
from vlmpipe.trainer.external.process_tree import Running, to_ask

HOSTS = ("chief:2222", "worker:2222")
PLATFORM = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "chief", "MASTER_PORT": "2222", "PET_NNODES": "2"}
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def trainer(launch: str, **changes: Any) -> ExternalTrainerConfig:
    return ExternalTrainerConfig.model_validate({"name": "t", "command": ["t", "a"], "launch": launch} | changes)


def second_node(launch: str, *, processes: int = 4) -> tuple[list[str], dict[str, str]]:
    """Command and variables of the second of two nodes."""
    node = Node(Cluster(HOSTS, 1), processes)
    return command_line(trainer(launch), ["t", "a"], node), environment(trainer(launch), node, {"VLMPIPE_DATA": "d"})


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLATFORM.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_torchrun_is_that_of_the_programs_own_environment_and_gives_the_ranks() -> None:
    command, variables = second_node("torchrun")
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"] and command[-3:] == ["--no-python", "t", "a"]
    given = dict(zip(command[3:-3:2], command[4:-3:2], strict=False))
    assert (given["--nnodes"], given["--node-rank"], given["--nproc-per-node"]) == ("2", "1", "4")
    assert (given["--master-addr"], given["--master-port"], given["--max-restarts"]) == ("chief", "2222", "0")
    assert not PLATFORM.keys() & variables.keys(), "they count nodes, and torchrun would pass some of them on"
    assert variables["VLMPIPE_DATA"] == "d" and variables["OMP_NUM_THREADS"]


def test_a_single_process_gets_torchruns_variables_without_torchrun() -> None:
    node = Node(Cluster(HOSTS[:1], 0), 1)
    assert command_line(trainer("torchrun"), ["t"], node) == ["t"]
    variables = environment(trainer("torchrun"), node, {})
    assert [variables[name] for name in RANKS] == ["0", "0", "1", "1"]


def test_self_is_told_nodes_and_processes_and_no_ranks() -> None:
    command, variables = second_node("self")
    assert command == ["t", "a"]
    told = {name: variables[name] for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")}
    assert list(told.values()) == ["2", "1", "4", "chief", "2222"]
    assert not {*RANKS, "PET_NNODES"} & variables.keys()


def test_each_node_has_the_platforms_variables_only() -> None:
    command, variables = second_node("each-node")
    assert command == ["t", "a"]
    assert PLATFORM.items() <= variables.items()


def test_horovodrun_starts_the_processes_of_its_only_node() -> None:
    node = Node(Cluster(HOSTS[:1], 0), 4)
    assert command_line(trainer("horovod"), ["t", "a"], node) == ["horovodrun", "-np", "4", "t", "a"]
    assert not PLATFORM.keys() & environment(trainer("horovod"), node, {}).keys()


def test_roles_count_all_replicas_chief_first() -> None:
    roles = Roles({"chief": ("c:1",), "worker": ("w:1",), "ps": ("p:1",), "evaluator": ("e:1",)}, "ps", 0)
    node = Node(roles.cluster(), 1, roles)
    assert not node.trains and node.name == "ps 0"
    variables = environment(trainer("roles"), node, {})
    assert [variables[name] for name in ("RANK", "WORLD_SIZE", "VLMPIPE_ROLE")] == ["2", "4", "ps"]
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("c", "1")
    task = json.loads(environment(trainer("tensorflow"), node, {})["TF_CONFIG"])
    assert task["task"] == {"type": "ps", "index": 0} and "evaluator" not in task["cluster"]


def test_a_program_of_another_environment_sees_its_own_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    node = Node(Cluster(HOSTS[:1], 0), 1)
    variables = environment(trainer("self", python="/envs/mine/bin/python"), node, {})
    assert variables["PATH"].split(os.pathsep)[0] == "/envs/mine/bin" and "PYTHONPATH" not in variables
    package = {"kind": "package", "package_uris": ["gs://a"], "executor_image_uri": "i", "python_module": "a.task"}
    assert command_line(trainer("self", **package), ["--x"], node) == [sys.executable, "-m", "a.task", "--x"]


@pytest.mark.parametrize(
    ("tree", "asked"),
    [
        ({2: (1, True), 3: (2, False), 4: (2, True)}, [2]),  # torchrun and its workers
        ({2: (1, False), 3: (2, True), 4: (3, False)}, [2, 3]),  # llamafactory-cli, which starts torchrun
        ({2: (1, False), 3: (2, False), 4: (3, True), 5: (4, True)}, [2, 3, 4]),  # a shell around that
        ({2: (1, True), 3: (2, False)}, [2]),  # a program that saves, and its data loaders
        ({2: (1, True), 7: (1, False)}, [2, 7]),  # an orphan has nobody else who tells it
    ],
)
def test_each_process_hears_of_a_stop_once(tree: dict[int, tuple[int, bool]], asked: list[int]) -> None:
    processes = [Running(pid, parent, handles) for pid, (parent, handles) in tree.items()]
    assert to_ask(1, processes) == asked


def test_a_script_may_import_the_modules_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps run with PYTHONSAFEPATH, which no image sets."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "PYTHONSAFEPATH" not in second_node("torchrun")[1]


# It says what becomes of its folder when it is asked to stop, and ends with it.
PROGRAM = """
import signal, sys, time
from pathlib import Path
folder, said = map(Path, sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(said.write_text(f"{folder.is_dir()}")))
(folder / "ready").touch()
time.sleep(600)
"""


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_an_error_of_the_launcher_ends_the_program_before_its_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="not foreseen"), program_folder() as scratch:
        folder = scratch.folder
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "said")]
        with TrainerProcess(command, {}, grace_s=20.0, lock=scratch.lock) as process:
            while not (folder / "ready").exists():
                assert process.wait(0.01) is None
            raise ValueError("not foreseen")
    assert (tmp_path / "said").read_text() == "True"
    assert not folder.exists()
