"""Files that a process and its children can open once the kernel holds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.trainer.confinement import landlock
from vlmpipe.trainer.errors import ExitCode, UserError

PROGRAM = """
import json, os, subprocess, sys
from vlmpipe.trainer.confinement.landlock import restrict_files

root, outside = sys.argv[1:]
restrict_files(writable=[root, "/dev"], readable=["/usr", "/lib", "/lib64", "/bin", "/etc", "/not-there", sys.prefix,
                                                  sys.base_prefix])
outcomes = {}

def attempt(name, action):
    try:
        action()
        outcomes[name] = "done"
    except OSError as error:
        outcomes[name] = type(error).__name__

attempt("write", lambda: open(f"{root}/a", "w").close())
attempt("rename", lambda: (os.mkdir(f"{root}/d"), os.rename(f"{root}/a", f"{root}/d/b")))
attempt("read outside", lambda: open(f"{outside}/secret").read())
attempt("write outside", lambda: open(f"{outside}/new", "w"))
attempt("list outside", lambda: os.listdir(outside))
attempt("remove outside", lambda: os.remove(f"{outside}/secret"))
attempt("by a link", lambda: (os.symlink(f"{outside}/secret", f"{root}/link"), open(f"{root}/link").read()))
attempt("write a program", lambda: open(os.path.join(sys.prefix, "pyvenv.cfg"), "a"))
child = subprocess.run(["cat", f"{outside}/secret"], capture_output=True)
outcomes["a child"] = child.returncode
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(landlock.abi() < landlock.MIN_ABI, reason="this kernel has no Landlock")
def test_a_process_and_its_children_open_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    command = [sys.executable, "-c", PROGRAM, str(root), str(outside)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert {name for name, outcome in outcomes.items() if outcome == "done"} == {"write", "rename"}
    assert outcomes["a child"] != 0
    assert set(outcomes.values()) - {"done", outcomes["a child"]} == {"PermissionError"}
    assert (outside / "secret").read_text() == "secret"


def test_a_system_without_it_is_an_error_that_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 1)
    with pytest.raises(UserError, match="--without-landlock") as caught:
        landlock.restrict_files(writable=[], readable=[])
    assert caught.value.code == ExitCode.UNAVAILABLE
