"""Rows of a BigQuery table, read with Google's own client; `BIGQUERY_EMULATOR_HOST` points it at an emulator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from google.api_core.exceptions import BadRequest, Forbidden, GoogleAPIError, NotFound
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import BIGQUERY
from vlmpipe.trainer.confinement.limits import require_address
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample, stable_digest
from vlmpipe.trainer.data.sources.base import Part, Records, Source
from vlmpipe.trainer.data.sources.image_files import open_image_files
from vlmpipe.trainer.data.sources.parquet import IMAGE_COLUMNS, RowSource, require_conversation
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.extras import install_command
from vlmpipe.trainer.storage.local import LocalStorage

if TYPE_CHECKING:
    from google.cloud import bigquery

PART_ROWS = 10_000  # rows that are read independently of others
PAGE_ROWS = 32  # rows in memory at once, with their images
EMULATOR = "BIGQUERY_EMULATOR_HOST"


class BigQuerySource(RowSource):
    """Rows in the order of the table. Columns are those of Parquet; an image is BYTES, or the address of a file."""

    format = "bigquery"

    def __init__(self, config: DataConfig) -> None:
        self.config, self._name = config, config.source.removeprefix(BIGQUERY)
        self.splits, self._empty = {}, {}  # no file's name states a split, and no file is empty
        require_address(config.source)
        self._client = _client(self._name.rsplit(".", 2)[0])  # a domain in front of a project has dots
        self._table = self._described()
        self._columns = self._chosen()
        # Without a folder no column names files.
        self.image_files = open_image_files(config, config.image_folder, LocalStorage(os.devnull))

    def fingerprint(self) -> str:
        """Covers the table's content, and every file of an image folder."""
        table = self._table
        described = stable_digest(
            self._name, str(table.modified), table.num_rows, [repr(column) for column in self._columns]
        )
        named = ""
        if self.config.image_folder or self.config.fetch:
            samples = (sample for sample in self if isinstance(sample, Sample))
            named = self.image_files.fingerprint(image.name for sample in samples for image in sample.images)
        return f"{self.format} {described} {named}"

    def recall(self, earlier: Source) -> None:
        """A table's content is told by its metadata, and its images by their rows."""

    def parts(self) -> Sequence[Records]:
        return [Part(partial(self.read, str(start))) for start in range(0, self._table.num_rows, PART_ROWS)]

    def read(self, name: str) -> Iterator[Sample | Reject]:
        """`name`: the number of the first row, from 0."""
        start = int(name)
        with _errors(self._name):
            rows = self._client.list_rows(
                self._table, self._columns, start_index=start, max_results=PART_ROWS, page_size=PAGE_ROWS
            )
            for number, row in enumerate(rows, start + 1):
                yield self.checked(f"{self._name} row {number}", dict(row.items()))
            if self._client.get_table(self._name).modified != self._table.modified:
                raise DataError(
                    f"the table {self._name} changed while it was read",
                    expected="rows that stay as they are until the data is prepared",
                    fix="read a snapshot (CREATE SNAPSHOT TABLE), or run again once no job writes to the table",
                )

    def _described(self) -> bigquery.Table:
        with _errors(self._name):
            table = self._client.get_table(self._name)
        if table.table_type not in ("TABLE", "SNAPSHOT", "CLONE"):
            raise ConfigError(
                f"{BIGQUERY}{self._name} is a {table.table_type}, whose rows only a query can give",
                expected="a table, or a snapshot of one",
                fix="write the view's rows into a table (CREATE TABLE ... AS SELECT)",
            )
        if table.streaming_buffer is not None:
            raise DataError(
                f"{BIGQUERY}{self._name} has about {table.streaming_buffer.estimated_rows or 0} rows in its streaming "
                "buffer, which its number of rows leaves out",
                expected="a table to which no job streams rows",
                fix="copy the rows with a query (CREATE TABLE ... AS SELECT), or wait until the buffer is empty",
            )
        if not table.num_rows:
            raise DataError(f"{BIGQUERY}{self._name} has no rows", expected="at least one")
        return table

    def _chosen(self) -> list[bigquery.SchemaField]:
        schema = self._table.schema
        mapped = self.config.columns
        chosen = [column for column in schema if column.name not in mapped.ignored]
        require_conversation([column.name for column in schema], mapped, f"{BIGQUERY}{self._name}")
        images = (*IMAGE_COLUMNS, *mapped.image)
        naming = [column.name for column in chosen if column.name in images and column.field_type == "STRING"]
        if naming and not self.config.image_folder and not self.config.fetch:
            raise ConfigError(
                f"{BIGQUERY}{self._name} names files in its column {naming[0]}",
                expected="data.image_folder: the folder, local or gs://, that they are in",
            )
        return chosen


def _client(project: str) -> bigquery.Client:
    try:
        from google.cloud import bigquery
    except ImportError as error:
        raise UserError(
            "data from BigQuery needs google-cloud-bigquery, which is not installed",
            fix=install_command("bigquery"),
            code=ExitCode.UNAVAILABLE,
        ) from error
    with _errors(project):
        return bigquery.Client(project, AnonymousCredentials() if os.environ.get(EMULATOR) else None)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Google's errors as sentences. Faults of the network were retried by the client."""
    try:
        yield
    except NotFound as error:
        fix = "correct data.source: bq://PROJECT.DATASET.TABLE"
        raise ConfigError(f"BigQuery has no {name}: {error.message}", fix=fix) from error
    except Forbidden as error:
        fix = "grant roles/bigquery.dataViewer on the table"
        raise UserError(f"BigQuery refuses {name}: {error.message}", fix=fix, code=ExitCode.NO_PERMISSION) from error
    except BadRequest as error:
        fix = "correct data.source: bq://PROJECT.DATASET.TABLE"
        raise ConfigError(f"BigQuery refuses {name}: {error.message}", fix=fix) from error
    except GoogleAuthError as error:
        fix = "run gcloud auth application-default login"
        raise UserError(f"no Google Cloud credentials: {error}", fix=fix, code=ExitCode.NO_LOGIN) from error
    except GoogleAPIError as error:
        raise UserError(f"BigQuery does not answer for {name}: {error}", code=ExitCode.UNAVAILABLE) from error
