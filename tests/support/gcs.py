"""Cloud Storage against the fake server."""

from __future__ import annotations

from trainer.storage.gcs import RETRY

QUICK_RETRY = RETRY.with_delay(initial=0.01, maximum=0.05).with_timeout(5.0)
