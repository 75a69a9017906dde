"""Modules that start often load nothing heavy. The order of imports is import-linter's: make lint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("vlmpipe.cli.app", {"torch", "transformers", "deepspeed", "kfp", "google.cloud.aiplatform"}),
        ("vlmpipe.trainer.config.job", {"torch", "transformers", "pyarrow"}),
        ("vlmpipe.trainer.data.prepare.pipeline", {"torch", "transformers"}),
        ("vlmpipe.trainer.data.prepare.chunks.worker_pool", {"torch", "transformers"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy & set(json.loads(answer.stdout)) == set()
