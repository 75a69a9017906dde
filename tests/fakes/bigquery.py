"""A strict fake of the part of BigQuery's REST API that reads tables: `tables.get` and `tabledata.list`.

Refused is what the reference of the two methods and of the names refuses: a name of other characters, a parameter that
the method does not have, a number that is none, a page token that no answer gave, rows of what is no table, and what a
caller's permissions do not cover: bigquery.tables.get and bigquery.tables.getData. Cells have the texts of their types,
and a row with a value of another type cannot be put into a table.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from vlmpipe.rehearsal.http_server import ApiError, Handler, LocalServer

PATH = re.compile(r"/bigquery/v2/projects/([^/]+)/datasets/([^/]+)/tables/([^/]+)(/data)?")
INT64_TIMES = "formatOptions.useInt64Timestamp"
PARAMETERS = {
    "tables.get": {"prettyPrint", "selectedFields", "view"},
    "tabledata.list": {
        "prettyPrint", "selectedFields", "startIndex", "maxResults", "pageToken", INT64_TIMES
    },
}  # fmt: skip
NAMES = {  # of projects, data sets and tables; with the names in the errors
    "project ID": re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"),
    "dataset ID": re.compile(r"\w{1,1024}", re.ASCII),
    "table ID": re.compile(r"[\w -]{1,1024}(\$\w+)?"),  # with a partition
}
LARGEST = {"startIndex": 2**64, "maxResults": 2**32}
TEXTS = datetime.date | datetime.time | decimal.Decimal | int | float  # whose text is the cell's
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
VIEWS = ("BASIC", "STORAGE_STATS", "FULL", "TABLE_METADATA_VIEW_UNSPECIFIED")
WITH_ROWS = ("TABLE", "SNAPSHOT", "CLONE")
MAX_ROWS = 7  # of a page: the service sends fewer than asked for where rows are large


@dataclass
class Table:
    schema: list[dict[str, Any]]
    rows: list[Sequence[Any]]
    kind: str = "TABLE"
    modified_ms: int = 1
    buffered_rows: int = 0  # the last ones, still in the streaming buffer, which numRows leaves out
    denied: tuple[str, ...] = ()  # permissions that the caller lacks
    reads: list[tuple[int, int]] = field(default_factory=list)  # start and number of rows of each page
    tokens: dict[str, int] = field(default_factory=dict)  # of pages that were answered: the row behind


class FakeBigQuery(LocalServer):
    """Tables by `project.dataset.table`."""

    def __init__(self, **tables: Table) -> None:
        super().__init__(_Handler)
        self.tables = {name.replace("__", "."): table for name, table in tables.items()}


class _Handler(Handler):
    def respond(self, body: bytes) -> None:
        try:
            with self.fake.lock:
                answer, code = self._answer(), 200
        except ApiError as error:
            reason = {403: "accessDenied", 404: "notFound"}.get(error.code, "invalid")
            details = {"message": error.message, "domain": "global", "reason": reason}
            answer, code = {"error": {"code": error.code, "message": error.message, "errors": [details]}}, error.code
        data = json.dumps(answer).encode()
        self.send(code, {"Content-Type": "application/json; charset=UTF-8", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _answer(self) -> dict[str, Any]:
        path, query = self.path_and_query()
        found = PATH.fullmatch(path)
        if self.command != "GET" or not found:
            raise ApiError(404, f"Not found: {self.command} {path}")
        parts = [unquote(part) for part in found.groups()[:3]]
        for (kind, form), part in zip(NAMES.items(), parts, strict=True):
            if not form.fullmatch(part):
                raise ApiError(400, f"Invalid {kind} {part!r}")
        method = "tabledata.list" if found[4] else "tables.get"
        if unknown := query.keys() - PARAMETERS[method]:
            raise ApiError(400, f"Invalid JSON payload received. Unknown name {sorted(unknown)[0]!r}")
        if query.get("view", VIEWS[0]) not in VIEWS:
            raise ApiError(400, f"Invalid value at 'view': {query['view']!r}")
        for parameter in ("prettyPrint", INT64_TIMES):
            if query.get(parameter, "true").lower() not in ("true", "false"):
                raise ApiError(400, f"Invalid value at {parameter!r} (TYPE_BOOL): {query[parameter]!r}")
        name = ".".join(parts)
        table = self.fake.tables.get(name)
        if table is None:
            raise ApiError(404, f"Not found: Table {name.replace('.', ':', 1)}")
        permission = "bigquery.tables.getData" if found[4] else "bigquery.tables.get"
        if permission in table.denied:
            raise ApiError(403, f"Access Denied: Table {name}: Permission {permission} denied")
        return self._rows(table, query) if found[4] else self._table(table, parts)

    def _table(self, table: Table, names: Sequence[str]) -> dict[str, Any]:
        reference = dict(zip(("projectId", "datasetId", "tableId"), names, strict=True))
        buffer: dict[str, Any] = {}
        if table.buffered_rows:
            buffer = {
                "streamingBuffer": {"estimatedRows": str(table.buffered_rows), "estimatedBytes": "1",
                                    "oldestEntryTime": "1"}
            }  # fmt: skip
        return {
            "kind": "bigquery#table", "tableReference": reference, "type": table.kind,
            "numRows": str(len(table.rows) - table.buffered_rows), **buffer,
            "schema": {"fields": table.schema}, "lastModifiedTime": str(table.modified_ms), "creationTime": "1",
        }  # fmt: skip

    def _rows(self, table: Table, query: dict[str, str]) -> dict[str, Any]:
        if table.kind not in WITH_ROWS:
            raise ApiError(400, f"Cannot list a table of type {table.kind}.")
        for parameter, largest in LARGEST.items():
            text = query.get(parameter, "0")
            if not text.isdigit() or int(text) >= largest:
                raise ApiError(400, f"Invalid value at {parameter!r}: {text!r}")
        token = query.get("pageToken", "")
        if token and token not in table.tokens:
            raise ApiError(400, f"Invalid page token {token!r}")
        start = table.tokens[token] if token else int(query.get("startIndex", 0))
        names = query["selectedFields"].split(",") if query.get("selectedFields") else None
        known = [one["name"] for one in table.schema]
        if names and not set(names) <= set(known):
            raise ApiError(400, f"No such field: {sorted(set(names) - set(known))[0]}")
        chosen = [number for number, one in enumerate(known) if names is None or one in names]
        page = table.rows[start : start + min(MAX_ROWS, int(query.get("maxResults", MAX_ROWS)))]
        table.reads.append((start, len(page)))
        in_micros = query.get(INT64_TIMES, "").lower() == "true"
        rows = [
            {"f": [{"v": _cell(table.schema[number], row[number], in_micros)} for number in chosen]} for row in page
        ]
        behind = start + len(page)
        more = {}
        if behind < len(table.rows):
            more = {"pageToken": secrets.token_urlsafe(8)}
            table.tokens[more["pageToken"]] = behind
        return {"kind": "bigquery#tableDataList", "totalRows": str(len(table.rows)), "rows": rows, **more}


def _cell(column: dict[str, Any], value: Any, in_micros: bool) -> Any:
    """A value as the service sends it: texts, lists of cells and records. A list that is NULL is stored empty."""
    if column.get("mode") == "REPEATED":
        return [{"v": _cell(column | {"mode": "NULLABLE"}, one, in_micros)} for one in value or ()]
    if value is None:
        assert column.get("mode") != "REQUIRED", f"{column['name']} is REQUIRED"
        return None
    kind = column["type"]
    if kind in ("RECORD", "STRUCT"):
        return {"f": [{"v": _cell(one, value.get(one["name"]), in_micros)} for one in column["fields"]]}
    if kind == "BYTES":
        return base64.b64encode(value).decode()
    if kind == "TIMESTAMP":
        micros = (value - EPOCH) // datetime.timedelta(microseconds=1)
        return str(micros) if in_micros else repr(micros / 1e6)
    if kind in ("BOOL", "BOOLEAN"):
        return str(value).lower()
    if kind == "JSON":
        return json.dumps(value)
    if kind == "DATETIME":
        return str(value.isoformat())
    assert isinstance(value, str | TEXTS), f"{kind}: {value!r}"
    return str(value)
