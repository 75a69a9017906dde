"""The files of an audit: all findings, the list of exclusions and the page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from vlmpipe.audit.page import build_page
from vlmpipe.trainer.audit.catalogue import PreparedSamples
from vlmpipe.trainer.audit.findings import EXCLUSIONS, FOLDER, Audit, exclusion_file
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri

PAGE = "audit.html"
EVERY_S = 2.0


def write_files(output: str, name: str, audit: Audit, stored: PreparedSamples) -> dict[str, str]:
    """Write the files into a folder, local or in a bucket. Returns their addresses by what they are."""
    store = open_storage(output)
    audit.write(store)
    store.write(EXCLUSIONS, exclusion_file(audit))
    store.write(PAGE, build_page(name, audit, stored).encode("utf-8", "replace"))
    return {"findings": store.uri(audit.FILE), "exclusions": store.uri(EXCLUSIONS), "page": store.uri(PAGE)}


def write_page(run_uri: str) -> tuple[Audit, bytes]:
    """Write the page of a run's job audit next to its findings. Raises ConfigError where the job has not run."""
    store = open_storage(join_uri(run_uri, FOLDER))
    audit = Audit.require(store)
    name = JobConfig.read(open_storage(run_uri)).run.run_id
    page = build_page(name, audit, PreparedSamples.open(audit.prepared_uri)).encode("utf-8", "replace")
    store.write(PAGE, page)
    return audit, page


def audit_counts(audit: Audit) -> dict[str, int]:
    """Samples that were audited, that are flagged by each finding, and that the list of exclusions has."""
    flagged: dict[str, int] = {finding.kind: finding.samples for finding in audit.findings}
    return {"samples": audit.samples, **flagged, "excluded": audit.excluded}


def progress_on_stderr() -> Callable[[str, int, int], None]:
    """Print at most a line of progress every EVERY_S seconds."""
    last = [time.monotonic()]

    def told(what: str, done: int, of: int) -> None:
        if time.monotonic() - last[0] >= EVERY_S:
            last[0] = time.monotonic()
            print(f"data-audit: {what} {done:,}/{of:,}", file=sys.stderr, flush=True)

    return told
