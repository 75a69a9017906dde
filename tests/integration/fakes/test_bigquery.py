"""The fake of BigQuery is strict: each request with one fault is refused with the service's status and reason."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Forbidden, GoogleAPICallError, NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.fakes.bigquery import MAX_ROWS, FakeBigQuery, Table

SCHEMA = [{"name": "id", "type": "INTEGER"}, {"name": "text", "type": "STRING"}]
PATH = "/bigquery/v2/projects/my-project/datasets/data/tables/{}"
NAME = "my-project.data.{}"


@pytest.fixture
def server() -> Iterator[FakeBigQuery]:
    rows = [(number, "x") for number in range(MAX_ROWS + 3)]
    with FakeBigQuery() as running:
        for name, table in {
            "samples": Table(SCHEMA, rows),
            "view": Table(SCHEMA, rows, kind="VIEW"),
            "materialized": Table(SCHEMA, rows, kind="MATERIALIZED_VIEW"),
            "external": Table(SCHEMA, rows, kind="EXTERNAL"),
            "snapshot": Table(SCHEMA, rows, kind="SNAPSHOT"),
            "closed": Table(SCHEMA, rows, denied=("bigquery.tables.get", "bigquery.tables.getData")),
            "described": Table(SCHEMA, rows, denied=("bigquery.tables.getData",)),
        }.items():
            running.tables[NAME.format(name)] = table
        yield running


def ask(server: FakeBigQuery, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "code", "reason", "said"),
    [
        ("none", 404, "notFound", "Table my-project:data.none"),
        ("none/data", 404, "notFound", "Table my-project:data.none"),
        ("sam*ples", 400, "invalid", "table ID"),
        ("samples?colour=red", 400, "invalid", "colour"),
        ("samples?startIndex=1", 400, "invalid", "startIndex"),
        ("samples?view=ALL", 400, "invalid", "view"),
        ("samples?prettyPrint=perhaps", 400, "invalid", "prettyPrint"),
        ("samples/data?formatOptions.useInt64Timestamp=1", 400, "invalid", "useInt64Timestamp"),
        ("samples/data?formatOptions.timestampOutputFormat=INT64", 400, "invalid", "timestampOutputFormat"),
        ("samples/data?view=BASIC", 400, "invalid", "view"),
        ("samples/data?startIndex=-1", 400, "invalid", "startIndex"),
        ("samples/data?startIndex=first", 400, "invalid", "startIndex"),
        ("samples/data?maxResults=-1", 400, "invalid", "maxResults"),
        ("samples/data?maxResults=4294967296", 400, "invalid", "maxResults"),
        ("samples/data?pageToken=2", 400, "invalid", "page token"),
        ("samples/data?selectedFields=id,colour", 400, "invalid", "colour"),
        ("view/data", 400, "invalid", "type VIEW"),
        ("materialized/data", 400, "invalid", "type MATERIALIZED_VIEW"),
        ("external/data", 400, "invalid", "type EXTERNAL"),
        ("closed", 403, "accessDenied", "bigquery.tables.get denied"),
        ("closed/data", 403, "accessDenied", "bigquery.tables.getData denied"),
        ("described/data", 403, "accessDenied", "bigquery.tables.getData denied"),
    ],
)
def test_a_request_with_one_fault_is_refused(
    server: FakeBigQuery, path: str, code: int, reason: str, said: str
) -> None:
    status, content = ask(server, PATH.format(path))
    error = content["error"]
    assert (status, error["code"], error["errors"][0]["reason"]) == (code, code, reason)
    assert said in error["message"]


@pytest.mark.parametrize("names", ["My-Project/datasets/data", "my-project/datasets/da-ta", "p/datasets/data"])
def test_a_name_of_other_characters_is_invalid(server: FakeBigQuery, names: str) -> None:
    assert ask(server, f"/bigquery/v2/projects/{names}/tables/samples")[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_is_written(server: FakeBigQuery, method: str) -> None:
    assert ask(server, PATH.format("samples"), method)[0] == 404


def test_what_may_be_read_is_read_page_by_page(server: FakeBigQuery) -> None:
    assert ask(server, PATH.format("described"))[0] == ask(server, PATH.format("snapshot/data"))[0] == 200
    first = ask(server, PATH.format("samples/data?selectedFields=text&startIndex=1"))[1]
    rest = ask(server, PATH.format(f"samples/data?startIndex=1&pageToken={first['pageToken']}"))[1]
    assert (len(first["rows"]), len(rest["rows"]), "pageToken" in rest) == (MAX_ROWS, 2, False)
    assert first["rows"][0] == {"f": [{"v": "x"}]} and rest["rows"][-1]["f"][0] == {"v": str(MAX_ROWS + 2)}
    assert ask(server, PATH.format("samples/data?startIndex=100"))[1]["rows"] == [], "beyond the last row are none"


Fault = Callable[[bigquery.Client], object]
# What the comments of Google's client and of the messages behind it say of each argument, as its own methods send it.
FAULTS: dict[str, tuple[Fault, type[GoogleAPICallError]]] = {
    "a project of another form": (lambda client: client.get_table("p.data.samples"), BadRequest),
    "a data set with a dash": (lambda client: client.get_table("my-project.da-ta.samples"), BadRequest),
    "a data set of another alphabet": (lambda client: client.get_table("my-project.donn\u00e9es.samples"), BadRequest),
    "a table with an asterisk": (lambda client: client.get_table("my-project.data.sam*"), BadRequest),
    "a table of 1025 characters": (lambda client: client.get_table(f"my-project.data.{'a' * 1025}"), BadRequest),
    "no such table": (lambda client: client.get_table("my-project.data.none"), NotFound),
    "a table that may not be described": (lambda client: client.get_table(NAME.format("closed")), Forbidden),
    "rows that may not be read": (lambda client: rows(client, "described"), Forbidden),
    "a view's rows": (lambda client: rows(client, "view"), BadRequest),
    "a first row before the first": (lambda client: rows(client, start_index=-1), BadRequest),
    "a page token that no answer gave": (lambda client: rows(client, page_token="2"), BadRequest),
    "a number of rows beyond 32 bits": (lambda client: rows(client, page_size=2**32), BadRequest),
    "a column that the table lacks": (
        lambda client: rows(client, selected_fields=[bigquery.SchemaField("colour", "STRING")]), BadRequest
    ),
    "picoseconds, a private preview": (
        lambda client: rows(client, timestamp_precision=bigquery.enums.TimestampPrecision.PICOSECOND), BadRequest
    ),
}  # fmt: skip


def rows(client: bigquery.Client, name: str = "samples", **settings: Any) -> list[Any]:
    return list(client.list_rows(client.get_table(NAME.format(name)), **settings))


def test_the_client_s_own_request_with_one_fault_is_refused(
    server: FakeBigQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", server.endpoint)
    client = bigquery.Client("my-project", AnonymousCredentials())
    assert len(rows(client)) == MAX_ROWS + 3
    for name, (ask_with_fault, error) in FAULTS.items():
        with pytest.raises(error):
            print(name, ask_with_fault(client))
