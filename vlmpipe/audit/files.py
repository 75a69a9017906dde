"""The files of an audit: all findings, the list of exclusions and the page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from vlmpipe.audit.page import build_page
from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import EXCLUSIONS, Audit, exclusion_file
from vlmpipe.trainer.storage import open_storage

PAGE = "audit.html"
EVERY_S = 2.0


def write_files(output: str, name: str, audit: Audit, catalogue: Catalogue) -> dict[str, str]:
    """Write the files into a folder, local or in a bucket. Returns their addresses by what they are."""
    store = open_storage(output)
    audit.write(store)
    store.write(EXCLUSIONS, exclusion_file(audit))
    store.write(PAGE, build_page(name, audit, catalogue).encode("utf-8", "replace"))
    return {"findings": store.uri(audit.FILE), "exclusions": store.uri(EXCLUSIONS), "page": store.uri(PAGE)}


def progress_on_stderr() -> Callable[[str, int, int], None]:
    """Print at most a line every EVERY_S seconds of what is done."""
    last = [time.monotonic()]

    def told(what: str, done: int, of: int) -> None:
        if time.monotonic() - last[0] >= EVERY_S:
            last[0] = time.monotonic()
            print(f"data-audit: {what} {done:,}/{of:,}", file=sys.stderr, flush=True)

    return told
