"""The wheel alone: it holds all that its commands need, and a folder of the user's own shadows nothing of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from tests.support.wheel import FOLDERS, python_with, run_installed, shadowing_packages, shared_install

PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The how-to's code up to this runs a whole pipeline, which the quickstart does too.
RUNS = "run = vlmpipe.run("


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_install(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_python_how_to_runs_beside_folders_of_the_same_names(installed: Path, tmp_path: Path) -> None:
    """The page's code, block after block as in a notebook. In the short form all but the run itself, which the
    quickstart makes (tests/e2e/test_quickstart.py)."""
    shadowing_packages(tmp_path)
    blocks = PYTHON_BLOCK.findall((ROOT / "docs/how-to/python-api.md").read_text())
    assert len(blocks) == 4
    (tmp_path / "configs").mkdir()
    assert run_installed(installed, tmp_path, "init", "--output", "configs/digits.yaml").returncode == 0
    *ours, components = blocks
    assert [block.startswith(RUNS) for block in ours] == [False, True, False]
    (tmp_path / "ours.py").write_text("\n".join(block for block in ours if WHOLE or not block.startswith(RUNS)))
    answer = python_with(installed, tmp_path, "ours.py")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert (tmp_path / "build/pipelines/digits.local.yaml").is_file()
    if WHOLE:
        assert "done " in answer.stdout and (tmp_path / "runs/runs/from-python/report.html").is_file()
    (tmp_path / "components_of_ours.py").write_text(components)
    answer = python_with(installed, tmp_path, "components_of_ours.py")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    prepared = re.search(r"ready for training: ([^\s']+)", answer.stdout)
    assert prepared and Path(prepared[1], "DONE").is_file()


CHECK_ALL = """
import json, sys
from typer.testing import CliRunner
from vlmpipe.cli.app import app
answers = (CliRunner().invoke(app, ["check", file, *sys.argv[2:]]) for file in sys.argv[1].split(","))
print("checked: " + json.dumps([[answer.exit_code, answer.output] for answer in answers]))
"""


@pytest.mark.slow
def test_every_template_is_inside_and_valid(installed: Path, tmp_path: Path) -> None:
    """Checked by one process: a check builds the model, for which torch is imported."""
    files = [f"{template}.yaml" for template in ("digits", "llava", "qwen-vl", "vertex")]
    for file in files:
        answer = run_installed(installed, tmp_path, "init", file.removesuffix(".yaml"))
        assert answer.returncode == 0 and (tmp_path / file).is_file(), answer.stderr
    again = run_installed(installed, tmp_path, "init", "llava")
    assert again.returncode == 64 and "exists already" in again.stderr
    settings = ("data.source=builtin:digits", "data.image_folder=")
    done = python_with(installed, tmp_path, "-c", CHECK_ALL, ",".join(files), *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = re.findall(r"^checked: (.*)$", done.stdout, re.MULTILINE)
    assert [code for code, _ in json.loads(said)] == [0] * len(files), said


def test_rehearse_needs_no_test_tools(installed: Path, tmp_path: Path) -> None:
    answer = python_with(
        installed, tmp_path, "-c", "import sys; sys.modules['pytest'] = None; import vlmpipe.rehearsal.serve"
    )
    assert answer.returncode == 0, answer.stderr


def test_the_skill_is_written_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    answer = run_installed(installed, tmp_path, "skill", "--json")
    assert answer.returncode == 0, answer.stderr
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md"))
    assert sorted(json.loads(answer.stdout)["files"]) == files and ".agents/skills/vlmpipe/SKILL.md" in files


BOTH = """
import trainer.task, pipelines.task, components.task
import vlmpipe
from vlmpipe.kfp_components import open_run
assert [each.task.NAME for each in (trainer, pipelines, components)] == json.loads(sys.argv[1])
config = vlmpipe.load(sys.argv[2])
assert not [finding for finding in vlmpipe.check(config) if finding.state == "failed"]
print(vlmpipe.compile(config, target="local"))
"""


@pytest.mark.parametrize(
    "start",  # as a notebook starts: the test below
    [pytest.param("command", marks=pytest.mark.slow), pytest.param("script", marks=pytest.mark.slow), "ours first"],
)
def test_a_user_s_trainer_and_our_api_work_in_one_process(installed: Path, tmp_path: Path, start: str) -> None:
    """Their own `trainer.task`, `pipelines.task` and `components.task`, in a folder from which plain Python starts."""
    shadowing_packages(tmp_path)
    code = "import json, sys\n" + ("import vlmpipe.cli.app\n" if start == "ours first" else "") + BOTH
    (tmp_path / "theirs.py").write_text(code)
    assert run_installed(installed, tmp_path, "init", "--output", "digits.yaml").returncode == 0
    names = json.dumps([f"the user's own {name}" for name in ("trainer", "pipelines", "components")])
    program = ("theirs.py",) if start == "script" else ("-c", code)
    answer = python_with(installed, tmp_path, *program, names, "digits.yaml")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]


def test_cells_of_a_notebook_s_kernel_import_theirs_and_ours(installed: Path, tmp_path: Path) -> None:
    """As a kernel starts: its folder is first on the path as "", and each cell is run when the one before has ended."""
    shadowing_packages(tmp_path)
    cells = [
        "import sys; assert sys.path[0] == '' and not sys.flags.safe_path",
        "import trainer.task, pipelines.task, components.task",
        "import vlmpipe, vlmpipe.trainer.errors, vlmpipe.pipelines.compile, vlmpipe.components.notify",
        "names = [one.task.NAME for one in (trainer, pipelines, components)]",
        "assert names == [f\"the user's own {name}\" for name in ('trainer', 'pipelines', 'components')], names",
        f"print(len(vlmpipe.load({str(ROOT / 'configs/digits.yaml')!r}).to_dict()), 'sections')",
    ]
    answer = python_with(installed, tmp_path, "-q", "-i", typed="\n".join(cells) + "\n")
    assert "sections" in answer.stdout and "Error" not in answer.stderr, answer.stdout[-3000:] + answer.stderr[-3000:]


def test_the_wheel_holds_one_package(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert folders - {"bin"} == {"vlmpipe"}
    assert {path.name for path in (installed / "vlmpipe").iterdir()} >= set(FOLDERS)
