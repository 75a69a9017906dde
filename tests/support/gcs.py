"""Cloud Storage against the fake server."""

from __future__ import annotations

from vlmpipe.trainer.storage.gcs import RETRY

TESTBENCH = "VLMPIPE_STORAGE_TESTBENCH"  # address of a running storage-testbench, such as http://localhost:9000
QUICK_RETRY = RETRY.with_delay(initial=0.01, maximum=0.05).with_timeout(5.0)
