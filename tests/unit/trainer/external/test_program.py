"""What of a training program makes its proof another one: every file of it that a start may run."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.external.program import program_digest

FILES = {
    "train.py": "import losses\nfrom nets.blocks import Block\n",
    "losses.py": "import torch\n",
    "nets/__init__.py": "",
    "nets/blocks.py": "from . import deep\nimport shared.math\n",
    "nets/deep/layer.py": "LAYER = 1\n",
    "shared/math.py": "x = 1\n",
    "settings.yaml": "rate: 1\n",
    "broken.py": "def (",
    ".venv/lib/torch/nn.py": "installed",
    "runs/old/train.py": "an old copy",
}
NOT_OF_IT = {".venv/lib/torch/nn.py", "runs/old/train.py"}
BY_FILE = ("python", "train.py", "--config", "settings.yaml", "--out", "{output}")
BY_MODULE = ("python", "-m", "nets.blocks", "--out", "{output}")


def digest(command: tuple[str, ...]) -> str:
    return program_digest(ExternalTrainerConfig(name="own", command=command))


@pytest.mark.parametrize(("command", "others"), [(BY_FILE, NOT_OF_IT), (BY_MODULE, {*NOT_OF_IT, "settings.yaml"})])
def test_each_file_that_is_imported_counts_and_no_other(
    command: tuple[str, ...], others: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    before = digest(command)
    for name, text in FILES.items():
        Path(name).write_text(f"{text}#")
        assert (digest(command) == before) == (name in others), name
        Path(name).write_text(text)
    assert digest(command) == before


def test_our_own_trainer_has_no_files_of_the_user() -> None:
    assert program_digest(None) == ""
