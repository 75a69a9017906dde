"""What tests of every kind share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.short_form import WHOLE

MEMORY = Path("/dev/shm")
# Files are tested side by side: threads of one would wait for processors that another has, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers would rewrite the assertions of all test files, and processes compile all modules, each time anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Models and data sets of tests are made here: nothing is asked of the Hugging Face Hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

# An example may take as long as it does: on a busy machine that says nothing of the code.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=100 if WHOLE else 30)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder for a few small files in memory, where there is one: flushing a file to the disk costs nothing there."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-test-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)
