"""The how-to of the Python API does what it says: its code runs, block after block, as in a notebook."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs/how-to/python-api.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.e2e
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 4
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    notebook = tmp_path / "notebook.py"
    notebook.write_text("\n".join(blocks))
    answer = subprocess.run(
        [sys.executable, str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert "done " in answer.stdout and (tmp_path / "runs/runs/from-python/report.html").is_file()
    assert (tmp_path / "build/pipelines/digits.local.yaml").is_file()
    prepared = re.search(r"ready for training: ([^\s']+)", answer.stdout)
    assert prepared and Path(prepared[1], "DONE").is_file()
