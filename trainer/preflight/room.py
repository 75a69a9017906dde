"""Room for a checkpoint, which ranks check before they train."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.local import LocalStorage

if TYPE_CHECKING:
    from vlmpipe.trainer.config.train import TrainConfig
    from vlmpipe.trainer.distributed.process import ProcessContext
    from vlmpipe.trainer.setup import TrainingSetup

GIB = 1 << 30


def require_room(run_uri: str, setup: TrainingSetup, worker: ProcessContext, settings: TrainConfig) -> None:
    """Raise UserError (73) when this node has no room for its share of one checkpoint, in fp32 with AdamW's state."""
    total_bytes = checkpoint_bytes(setup.num_trainable, settings, worker.world_size)
    store = open_storage(run_uri)
    needs = {Path(tempfile.gettempdir()): total_bytes // worker.num_nodes}
    if isinstance(store, LocalStorage):
        needs[store.root] = total_bytes
    for folder, needed_bytes in needs.items():
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise UserError(
                f"no space left for a checkpoint: {folder} has {free_bytes / GIB:,.2f} GiB free",
                expected=f"at least {needed_bytes / GIB:,.2f} GiB, for weights and optimizer state of "
                f"{setup.num_trainable:,} trained parameters",
                fix="free space, choose another TMPDIR or output.root_uri, or give the machines a larger boot disk "
                "(cluster.boot_disk_size_gb)",
                code=ExitCode.CANNOT_WRITE,
            )
