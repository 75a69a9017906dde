"""Modules that start often load nothing heavy. The order of imports is import-linter's: make lint."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, files_of_repository
from tests.support.trainer.tiny_runs import TINY, merged
from tests.support.wheel import FOLDERS
from vlmpipe.trainer.storage.local import LocalStorage

# Parsing all files takes seconds: those in which one of the names may stand after `import` or `from`.
MAY_IMPORT = re.compile(rf"\b(?:import|from)\b(?:[\w.,\s\\]*,)?[\s\\]*(?:{'|'.join(FOLDERS)})\b")
SECTIONS = {"vlmpipe.config.run_config", "vlmpipe.trainer.config.job"}  # of the run file


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("vlmpipe.cli.app", {"torch", "transformers", "deepspeed", "kfp", "google.cloud.aiplatform"}),
        ("vlmpipe.trainer.config.job", {"torch", "transformers", "pyarrow"}),
        # status and compare take most of their time to start.
        ("vlmpipe.runs.folders.summary", {"numpy", "yaml", "vlmpipe.trainer.checkpoint.commit", *SECTIONS}),
        ("vlmpipe.cli.views.comparison", {"pyarrow", "jinja2", *SECTIONS}),
        ("vlmpipe.trainer.evaluation.metrics", {"vlmpipe.trainer.data.prepare.validation.deduplicate"}),
        ("vlmpipe.cli.runs.removal_lines", {"rich", "numpy", "yaml", *SECTIONS}),
        ("vlmpipe.trainer.data.prepare.pipeline", {"torch", "transformers"}),
        ("vlmpipe.trainer.data.prepare.chunks.worker_pool", {"torch", "transformers"}),
        # Processes that start others, which have the model.
        ("vlmpipe.trainer.trials.tune", {"torch", "numpy"}),
        ("vlmpipe.trainer.external.evaluate", {"torch", "transformers"}),
        ("vlmpipe.trainer.external.sync", {"torch", "transformers"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy & set(json.loads(answer.stdout)) == set()


PREPARES = """
import json, sys
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.progress import Progress

job = JobConfig.load(sys.argv[1])
prepare_run(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
print(json.dumps(sorted(sys.modules)))
"""


def test_preparation_by_a_trained_tokenizer_without_a_cache_loads_no_torch(tmp_path: Path) -> None:
    """By all that it does, with the end of the step, where the features of a cache would be looked for."""
    small = {"data.max_samples": 12, "data.shard_samples": 12, "features.cache": "off"}
    store = LocalStorage(tmp_path / "runs" / "r")
    store.write(
        "run.json", json.dumps(merged(TINY, small) | {"run": {"run_id": "r", "root_uri": str(tmp_path)}}).encode()
    )
    command = [sys.executable, "-c", PREPARES, store.uri("run.json")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(answer.stdout.splitlines()[-1]))
    assert "tokenizers" in loaded and not loaded & {"torch", "vlmpipe.trainer.models.hf_native.pretrained"}


def test_ranks_load_their_modules_without_searches_for_cycles() -> None:
    """Which are a fifth of the time: outside `with collector_off()` a rank's module imports the standard library."""
    found = set()
    ranks = [path for path in (ROOT / "trainer").rglob("*.py") if "    run_worker(main)" in path.read_text()]
    for path in ranks:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {
                f"{path.name}: {name}"
                for name in names
                if name.split(".")[0] not in sys.stdlib_module_names and name != "vlmpipe.trainer.gc_control"
            }
    assert len(ranks) >= 6 and found == set()


def test_our_packages_are_imported_by_their_own_name_only() -> None:
    """`import trainer` from the top of a clone would load a second copy of each module."""
    found = set()
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files_of_repository("*.py")}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source if MAY_IMPORT.search(source) else "")):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {f"{path}: {name}" for name in names if name.split(".")[0] in FOLDERS}
    assert found == set()
