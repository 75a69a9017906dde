"""`vlmpipe compile` and `vlmpipe run` as they are started elsewhere: other locales, no home, another uid, no stdout.

Own data whose files, folders and texts are Chinese and have umlauts. docs/reference/environments.md is held to the
rows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes import poor_file_system
from tests.fakes.poor_file_system import ANSWERS
from tests.support.data.prepared import png
from tests.support.paths import ROOT
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.runs import TINY, merged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 if WHOLE else 120)]

ROOT_NAME = "läufe"
PAGE = ROOT / "docs/reference/environments.md"
START = "import sys; sys.argv[0] = 'vlmpipe'; from vlmpipe.cli.entry import console; console()"
AS_ANOTHER = ("unshare", "--user", "--map-user=12345")  # a number that /etc/passwd does not have
NO_STDOUT = ("sh", "-c", 'exec "$@" >&-', "sh")
LEFT_BEHIND = {
    "CLUSTER_SPEC": json.dumps({"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool1", "index": 0}}),
    "TF_CONFIG": '{"task": {"type": "worker", "index": 3}}',
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "elsewhere.invalid",
}
LOCALES = {"en_US.ISO-8859-1": ("ISO-8859-1", "en_US"), "ja_JP.EUC-JP": ("EUC-JP", "ja_JP")}


@dataclass(frozen=True)
class Row:
    """One environment: variables to set, those to take away, and what the command is started through."""

    set: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    locale: str = ""
    home: str = ""  # how the folder for HOME is made
    lacks: dict[str, str] = field(default_factory=dict)  # operations of the file system of output.root_uri
    code: int = 0
    says: str = ""


ROWS = {
    "locale ISO-8859-1": Row(locale="en_US.ISO-8859-1"),
    "locale EUC-JP": Row(locale="ja_JP.EUC-JP"),
    "locale C": Row(set={"LC_ALL": "C"}),
    "locale C, PYTHONUTF8=0": Row(
        set={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, code=64, says="set PYTHONUTF8=1"
    ),
    "read-only home": Row(home="read-only"),
    "no home": Row(unset=("HOME",), through=AS_ANOTHER),
    "stdout closed": Row(through=NO_STDOUT),
    "variables of a platform": Row(set=LEFT_BEHIND),
    "PYTHONOPTIMIZE=1": Row(set={"PYTHONOPTIMIZE": "1"}),
    "PYTHONOPTIMIZE=2": Row(set={"PYTHONOPTIMIZE": "2"}, code=64, says="unset PYTHONOPTIMIZE"),
    **{f"file system: {operation}": Row(lacks={operation: answers[0]}) for operation, answers in ANSWERS.items()},
    "all of them": Row(
        set=LEFT_BEHIND,
        unset=("HOME",),
        through=(*AS_ANOTHER, *NO_STDOUT),
        locale="en_US.ISO-8859-1",
        lacks={operation: answers[-1] for operation, answers in ANSWERS.items()},
    ),
}
ROWS_HERE = chosen(ROWS, lambda name: name == "all of them")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own data and a run file."""
    folder = tmp_path_factory.mktemp("plätze")
    images = folder / "图片"
    images.mkdir()
    records = []
    for number in range(24):
        (images / f"照片-ü{number}.png").write_bytes(png(number))
        answer = ["猫", "狗", "Bär"][number % 3]
        turns = [{"from": "human", "value": "<image>\n这是什么 ä?"}, {"from": "gpt", "value": answer}]
        records.append({"id": f"样本-{number}", "image": f"照片-ü{number}.png", "conversations": turns})
    (folder / "daten-ü.json").write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    changes = {
        "data": {"source": "daten-ü.json", "image_folder": "图片", "sequence_length": 256},
        "train.max_steps": 2,
        "evaluate.controls": [],
        "evaluate.max_samples": 4,
    }
    (folder / "lauf.yaml").write_text(json.dumps(merged(TINY, changes), ensure_ascii=False), encoding="utf-8")
    return folder


def environment_of(row: Row, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **row.set}
    for name in ("LC_ALL", "LANG", "LC_CTYPE", "PYTHONUTF8", "PYTHONIOENCODING", *row.unset):
        if name not in row.set:
            environment.pop(name, None)
    if row.locale:
        environment |= {"LOCPATH": str(made_locale(row.locale, folder)), "LC_ALL": row.locale}
    if row.home:
        home = folder / "home"
        home.mkdir(mode=0o500)
        environment["HOME"] = str(home)
    if row.lacks:
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").symlink_to(poor_file_system.__file__)
        environment["PYTHONPATH"] += f"{os.pathsep}{site}"
        answers = ",".join(f"{operation}={answer}" for operation, answer in row.lacks.items())
        environment[poor_file_system.VARIABLE] = f"{folder / ROOT_NAME}:{answers}"
    return environment


def made_locale(name: str, folder: Path) -> Path:
    """A folder with a locale that Debian does not install, for LOCPATH."""
    if shutil.which("localedef") is None:
        pytest.skip("no localedef here")
    charmap, source = LOCALES[name]
    locales = folder / "locales"
    locales.mkdir()
    command = ["localedef", "-f", charmap, "-i", source, str(locales / name)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if not (locales / name).is_dir():
        pytest.skip(f"localedef makes no {name} here: {done.stderr}")
    return locales


def start(row: Row, folder: Path, place: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    if row.through[:1] == AS_ANOTHER[:1] and subprocess.run([*AS_ANOTHER, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    command = [*row.through, sys.executable, "-c", START, *arguments]
    return subprocess.run(command, cwd=place, env=environment_of(row, folder), capture_output=True)


def as_said(row: Row, done: subprocess.CompletedProcess[bytes]) -> None:
    assert done.returncode == row.code, done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    assert row.says.encode() in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", ROWS_HERE)
def test_compiles(name: str, tmp_path: Path, place: Path) -> None:
    row, output = ROWS_HERE[name], tmp_path / "grün.yaml"
    as_said(row, start(row, tmp_path, place, "compile", "lauf.yaml", "--target", "local", "--output", str(output)))
    assert output.is_file() is not row.code


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_runs(name: str, tmp_path: Path, place: Path) -> None:
    row, root = ROWS[name], tmp_path / ROOT_NAME
    as_said(row, start(row, tmp_path, place, "run", "lauf.yaml", "--run-id", "one", f"output.root_uri={root}"))
    if row.code == 0:
        report = (root / "runs/one/report.html").read_text(encoding="utf-8")
        answers = [json.loads(line) for line in (root / "runs/one/predictions.jsonl").open(encoding="utf-8")]
        assert answers and {answer["answer"] for answer in answers} <= {"猫", "狗", "Bär"}
        assert "这是什么 ä?" in report


def test_the_page_has_a_line_for_each_row() -> None:
    lines = re.findall(r"^\| `([^|]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(ROWS) <= set(lines)
