"""One start of a training job as far as its checkpoints go: python -m tests.support.crash.program ROOT SCRATCH

The environment says where it kills itself (VLMPIPE_CRASH_AT).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.crash.world import run_once
from vlmpipe.trainer.storage import open_storage

if __name__ == "__main__":
    root_uri, scratch = sys.argv[1:]
    run_once(open_storage(root_uri), Path(scratch))
