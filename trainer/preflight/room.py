"""Room for a checkpoint, which ranks check before they train."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes, node_bytes
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.local import LocalStorage

if TYPE_CHECKING:
    from vlmpipe.trainer.config.train import TrainConfig
    from vlmpipe.trainer.distributed.process import ProcessContext

GIB = 1 << 30


def require_room(run_uri: str, num_trained: int, worker: ProcessContext, settings: TrainConfig) -> None:
    """Raise UserError (73) when this node has no room for what it saves and what it resumes from, a start later.

    Args:
        num_trained: trained parameters of the whole model.

    Both with fp32 weights and AdamW's state. The first start checks the resume's room already.
    """
    store = open_storage(run_uri)
    of_node = node_bytes(
        num_trained,
        settings,
        nodes=worker.num_nodes,
        in_bucket=not isinstance(store, LocalStorage),
    )
    needs = {Path(tempfile.gettempdir()): of_node}
    if isinstance(store, LocalStorage):
        needs[store.root] = checkpoint_bytes(num_trained, settings)
    for folder, needed_bytes in needs.items():
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise UserError(
                f"no space left for a checkpoint: {folder} has {free_bytes / GIB:,.2f} GiB free",
                expected=f"at least {needed_bytes / GIB:,.2f} GiB, for weights and optimizer state of "
                f"{num_trained:,} trained parameters",
                fix="free space, choose another TMPDIR or output.root_uri, or give the machines a larger boot disk "
                "(cluster.boot_disk_size_gb)",
                code=ExitCode.CANNOT_WRITE,
            )
