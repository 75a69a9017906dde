"""Modules that start often load nothing heavy. The order of imports is import-linter's: make lint."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.wheel import FOLDERS

# Parsing all files takes seconds: those in which one of the names may stand after `import` or `from`.
MAY_IMPORT = re.compile(rf"\b(?:import|from)\b(?:[\w.,\s\\]*,)?[\s\\]*(?:{'|'.join(FOLDERS)})\b")
SECTIONS = {"vlmpipe.config.run_config", "vlmpipe.trainer.config.job"}  # of the run file


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("vlmpipe.cli.app", {"torch", "transformers", "deepspeed", "kfp", "google.cloud.aiplatform"}),
        ("vlmpipe.trainer.config.job", {"torch", "transformers", "pyarrow"}),
        # status and compare take most of their time to start.
        ("vlmpipe.platforms.local.runs.summary", {"numpy", "yaml", "vlmpipe.trainer.checkpoint.commit", *SECTIONS}),
        ("vlmpipe.cli.views.comparison", {"pyarrow", "jinja2", *SECTIONS}),
        ("vlmpipe.trainer.evaluation.metrics", {"vlmpipe.trainer.data.prepare.validation.deduplicate"}),
        ("vlmpipe.cli.runs.removal_lines", {"rich", "numpy", "yaml", *SECTIONS}),
        ("vlmpipe.trainer.data.prepare.pipeline", {"torch", "transformers"}),
        ("vlmpipe.trainer.data.prepare.chunks.worker_pool", {"torch", "transformers"}),
        ("vlmpipe.trainer.external.launch", {"torch", "transformers"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy & set(json.loads(answer.stdout)) == set()


def test_our_packages_are_imported_by_their_own_name_only() -> None:
    """`import trainer` from the top of a clone would load a second copy of each module."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = set()
    sources = {path: (ROOT / path).read_text() for path in listed.splitlines()}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source if MAY_IMPORT.search(source) else "")):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {f"{path}: {name}" for name in names if name.split(".")[0] in FOLDERS}
    assert found == set()
