"""The step that downloads images which records name by addresses of the web, before anything else reads them.

Each address is asked once, whatever the number of records that name it. What was downloaded is kept, so a step that was
ended continues where it was.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.accounting.coverage import Coverages
from vlmpipe.trainer.data.fetching.download import Downloader, DownloadError, with_retries
from vlmpipe.trainer.data.fetching.store import FetchedImages, key_of
from vlmpipe.trainer.data.fetching.web_address import without_query
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record
from vlmpipe.trainer.storage.transfer import in_parallel

THREADS = 16  # each holds an image in memory
REPORT = "fetched.json"  # in the run's folder
EXAMPLES = 5  # addresses of each reason in the report
HOPELESS = 64  # addresses that fail before any is downloaded: the network is away
GIB, HOUR_S = 1 << 30, 3600

Download = Callable[[str], bytes]  # raises DownloadError


@dataclass
class Fetched:
    """Outcome of fetching the addresses of a run's data."""

    addresses: int = 0  # different ones
    before: int = 0  # images that were there
    now: int = 0  # downloaded by this step
    bytes: int = 0  # of both
    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, list[str]] = field(default_factory=dict)

    def fail(self, address: str, reason: str) -> None:
        self.failed[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(without_query(address))

    def as_json(self) -> dict[str, object]:
        return {**vars(self), "failed": dict(self.failed.most_common())}

    def sentence(self) -> str:
        """Such as "40 addresses of the web: 38 images fetched now, 0 before, 1.2 MB; 2 not (404 Not Found 2)"."""
        text = f"{self.addresses:,} addresses of the web: {self.now:,} images fetched now, {self.before:,} before, "
        text += f"{self.bytes / 1e6:,.1f} MB"
        if not self.failed:
            return text
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.failed.most_common(3))
        more = f" and {len(self.failed) - 3} more reasons" if len(self.failed) > 3 else ""
        return f"{text}; {self.failed.total():,} not ({reasons}{more}), which {REPORT} lists"


def fetch_images(config: JobConfig, progress: Progress, download: Download | None = None) -> Fetched:
    """Download the images of the run's data that are not in the store yet, and write the report into the run's folder.

    Raises DataError (65) beyond a bound of the run file and for media that nothing reads, and UserError (69) where
    nothing can be downloaded at all.

    Args:
        download: by default over HTTP, with retries.
    """
    data = config.data
    store = FetchedImages(data.fetched_folder, data.max_image_bytes)
    over_http = Downloader(data.max_image_bytes)
    download = download or (lambda address: with_retries(over_http, address))
    fetched, start_s = Fetched(), time.monotonic()
    addresses = _addresses(data, progress)
    (fetched.addresses,) = next(addresses.execute("SELECT count(*) FROM addresses"))
    _require_few(fetched.addresses, data)
    try:
        rows: Iterator[tuple[str, str]] = addresses.execute("SELECT key, address FROM addresses ORDER BY rowid")
        results = in_parallel(lambda row: _fetched(store, download, *row), rows, threads=THREADS)
        for done, (address, is_new, size_bytes, reason) in enumerate(results, 1):
            if reason:
                fetched.fail(address, reason)
            fetched.now += is_new and not reason
            fetched.before += not is_new and not reason
            fetched.bytes += size_bytes
            failed = fetched.failed.total()
            progress.update(done, fetched.addresses, unit="images", message=f"fetching, {failed} failed")
            _check(fetched, data, time.monotonic() - start_s)
    finally:
        fetched.seconds = round(time.monotonic() - start_s, 1)
        write_record(open_storage(config.run.run_uri), REPORT, fetched.as_json(), indent=1)
    return fetched


def _addresses(data: DataConfig, progress: Progress) -> sqlite3.Connection:
    """A table of the data's different addresses, in their order. Raises DataError for media that nothing reads."""
    table = disk_table("CREATE TABLE addresses (key TEXT UNIQUE, address TEXT)")
    coverages = Coverages(data)
    for read, record in enumerate(coverages.counting(islice(open_source(data), data.max_samples or None)), 1):
        progress.update(read, unit="samples", message="reading records for addresses")
        for image in record.images if isinstance(record, Sample) else ():
            if image.address:
                table.execute("INSERT OR IGNORE INTO addresses VALUES (?, ?)", (key_of(image.address), image.address))
    coverages.check()
    return table


def _fetched(store: FetchedImages, download: Download, key: str, address: str) -> tuple[str, bool, int, str]:
    """The address, whether it was asked now, bytes of its image, and why there is none."""
    if store.holds(key):
        return address, False, store.size_bytes(key), ""
    try:
        data = download(address)
    except DownloadError as error:
        if error.is_final:
            store.add_failure(key, str(error))
        return address, True, 0, str(error)
    store.add(key, data)
    return address, True, len(data), ""


def _require_few(addresses: int, data: DataConfig) -> None:
    if addresses > data.max_fetched_images:
        raise DataError(
            f"the records name {addresses:,} addresses of the web, more than data.max_fetched_images "
            f"{data.max_fetched_images:,}",
            expected="no more images than the run file allows; none was fetched",
            fix="set data.max_fetched_images to more, or data.max_samples to fewer records",
        )


def _check(fetched: Fetched, data: DataConfig, seconds: float) -> None:
    if fetched.bytes > data.max_fetched_gib * GIB:
        raise _bound(fetched, f"more than data.max_fetched_gib {data.max_fetched_gib:g}", "max_fetched_gib")
    if seconds > data.max_fetch_hours * HOUR_S:
        raise _bound(fetched, f"longer than data.max_fetch_hours {data.max_fetch_hours:g}", "max_fetch_hours")
    if fetched.failed.total() == HOPELESS and not fetched.now + fetched.before:
        reason, _ = fetched.failed.most_common(1)[0]
        raise UserError(
            f"none of the first {HOPELESS} addresses could be fetched: {fetched.examples[reason][0]} {reason}",
            expected="a machine that reaches the public internet without a proxy, and addresses that still exist",
            fix="try one of the addresses from the machine of this step; private addresses are never asked",
            code=ExitCode.UNAVAILABLE,
        )


def _bound(fetched: Fetched, bound: str, name: str) -> DataError:
    return DataError(
        f"fetching images takes {bound}, after {fetched.now + fetched.before:,} of {fetched.addresses:,} addresses",
        expected="no more than the run file allows; what was fetched is kept",
        fix=f"raise data.{name} and run again, which continues from there, or use fewer records (data.max_samples)",
    )
