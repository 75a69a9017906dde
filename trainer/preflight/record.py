"""Records of a job that ends in its launcher: what `status` and `diagnose` read of it."""

from __future__ import annotations

from vlmpipe.trainer.distributed.cluster_env import PREFLIGHT_FILE
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record


def record_failure(run_uri: str, step: str, node: int, machine: dict[str, object], error: UserError) -> None:
    """Write the node's report to preflight.json, and the error to the step's record."""
    if not run_uri:
        return
    report = {"world_size": 0, "nodes": [{"node": node, "machine": machine}], "all_reduce": {}}
    write_record(open_storage(run_uri), PREFLIGHT_FILE, report)
    if step:
        progress = Progress(run_uri, step, quiet=True)
        progress.record.detail.update(exit_code=int(error.code), error=error.text())
        progress.finish("failed", error.found.splitlines()[0][:300])
