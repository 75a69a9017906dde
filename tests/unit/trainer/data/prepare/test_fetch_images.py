"""Images of the web are fetched once, within bounds, with a report; a step that was ended goes on where it was."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data.prepared import conversation, job_config, png, run_prepare
from tests.support.data.web_server import Answer, WebServer
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.fetching.download import DownloadError, with_retries
from vlmpipe.trainer.data.fetching.folder import FOLDER, with_fetched_folder
from vlmpipe.trainer.data.prepare.fetch_images import Fetched, fetch_images
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
from vlmpipe.trainer.data.prepare.look import look_at
from vlmpipe.trainer.data.prepare.pipeline import plan_chunks, prepare_share
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.progress import Progress

ROWS = 12


def config_of(folder: Path, addresses: list[str], **data: Any) -> JobConfig:
    """A run whose records name these images, each in two records."""
    rows = [
        {"id": n, "image": addresses[n % len(addresses)], "conversations": conversation("<image>\nWhich?", f"No. {n}.")}
        for n in range(2 * len(addresses))
    ]
    source = folder / "set.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job_config(folder / "root", source=str(source), fetch=True, **data)


def pictures(web: WebServer, count: int = ROWS) -> list[str]:
    return [web.says(f"/{number}.png", Answer(png(number))) for number in range(count)]


def fetched(config: JobConfig, **more: Any) -> Fetched:
    config = with_fetched_folder(config)
    return fetch_images(config, Progress(config.run.run_uri, "prepare-data", quiet=True), **more)


def report(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("fetched.json")
    return dict(json.loads(path.read_text()))


def test_each_address_is_asked_once_and_prepared(web: WebServer, tmp_path: Path) -> None:
    config = config_of(tmp_path, pictures(web))
    prepared = run_prepare(config)
    assert prepared.counts["accepted"] == prepared.counts["images"] == 2 * ROWS
    assert set(web.asked.values()) == {1} and len(web.asked) == ROWS
    assert f"{ROWS} addresses of the web: {ROWS} images fetched now, 0 before" in prepared.notes
    assert report(tmp_path)["now"] == ROWS
    again = run_prepare(config)
    assert again.reused and set(web.asked.values()) == {1}
    assert f"0 images fetched now, {ROWS} before" in again.notes
    assert find_prepared(config) == prepared.uri


def test_chunks_of_other_tasks_read_what_the_plan_has_fetched(web: WebServer, tmp_path: Path) -> None:
    config = config_of(tmp_path, pictures(web), chunk_samples=4, workers=1)
    progress = Progress(config.run.run_uri, "prepare-data", quiet=True)
    chunks, identity = astuple(plan_chunks(config, progress))
    assert chunks > 1 and set(web.asked.values()) == {1}
    assert sum(prepare_share(config, identity, task, 2, progress) for task in range(2)) == chunks
    assert run_prepare(config).counts["accepted"] == 2 * ROWS and set(web.asked.values()) == {1}


def test_columns_of_addresses_are_fetched_when_they_are_named(web: WebServer, tmp_path: Path) -> None:
    rows = [{"image_url": address, "caption": f"No. {n}."} for n, address in enumerate(pictures(web))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
    columns = {"image": "image_url"}
    config = job_config(tmp_path / "root", source=str(tmp_path / "set.parquet"), columns=columns, fetch=True)
    assert run_prepare(config).counts["images"] == ROWS
    without = job_config(tmp_path / "root", source=str(tmp_path / "set.parquet"), fetch=True)
    with pytest.raises(DataError, match="a caption without an image; not read: image_url \\(an address\\)"):
        run_prepare(without)


def test_a_look_at_the_data_fetches_nothing_and_says_so(web: WebServer, tmp_path: Path) -> None:
    data = config_of(tmp_path, pictures(web)).data
    kind, sentence, _ = look_at(open_source(data), data).verdict(data)
    assert kind == "ok" and not web.asked
    assert "24 images are fetched from the web when the run starts" in sentence and "texts of all were" in sentence


def test_nothing_is_fetched_unless_it_is_asked_for(web: WebServer, tmp_path: Path) -> None:
    config = config_of(tmp_path, pictures(web))
    config = config.model_copy(update={"data": config.data.model_copy(update={"fetch": False})})
    with pytest.raises(DataError, match=r"files of the web are not fetched; .* or set data.fetch: true"):
        run_prepare(config)
    assert not web.asked


def test_what_cannot_be_fetched_is_rejected_with_its_reason_and_asked_no_more(web: WebServer, tmp_path: Path) -> None:
    addresses = [*pictures(web), web.says("/gone.png?key=secret", Answer(status=404))]
    config = config_of(tmp_path, addresses, max_reject_fraction=0.2)
    prepared = run_prepare(config)
    assert (prepared.counts["accepted"], prepared.counts["rejected"]) == (2 * ROWS, 2)
    assert "1 not (404 Not Found 1), which fetched.json lists" in prepared.notes
    rejects = [json.loads(line) for line in open_prepared(prepared.uri).read("rejects.jsonl").splitlines()]
    assert {reject["code"] for reject in rejects} == {"ref.missing"}
    assert all("/gone.png was not fetched: 404 Not Found" in reject["message"] for reject in rejects)
    assert "secret" not in json.dumps([rejects, report(tmp_path)])
    assert run_prepare(config).uri == prepared.uri and web.asked["/gone.png?key=secret"] == 1


def test_an_image_that_comes_later_is_other_data(web: WebServer, tmp_path: Path, monkeypatch: Any) -> None:
    late = web.says("/late.png", *[Answer(status=500)] * 4, Answer(png(99)))
    config = config_of(tmp_path, [*pictures(web), late], max_reject_fraction=0.2)
    monkeypatch.setitem(with_retries.__kwdefaults__, "first_wait_s", 0.0)
    first = run_prepare(config)
    assert first.counts["rejected"] == 2
    second = run_prepare(config)
    assert second.counts["rejected"] == 0 and second.fingerprint != first.fingerprint


def test_a_step_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    addresses = [f"http://images.test/{number}.png" for number in range(60)]
    config, asked = config_of(tmp_path, addresses), list[str]()

    def download(address: str) -> bytes:
        asked.append(address)
        if len(asked) == 30:
            raise KeyboardInterrupt
        return png(1)

    with pytest.raises(KeyboardInterrupt):
        fetched(config, download=download)
    found = fetched(config, download=lambda address: (asked.append(address), png(1))[1])
    assert found.addresses == 60 and found.now + found.before == 60
    assert len(asked) <= 61 and set(asked) == set(addresses), "only the one that was ended is asked twice"


BOUNDS = {
    "max_fetched_images": (5, r"12 addresses of the web, more than data.max_fetched_images 5"),
    "max_fetched_gib": (1e-6, r"more than data.max_fetched_gib 1e-06, after 1 of 12"),
    "max_fetch_hours": (1e-12, r"longer than data.max_fetch_hours 1e-12, after 1 of 12"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_end_the_step_and_keep_what_was_fetched(tmp_path: Path, name: str) -> None:
    bound, words = BOUNDS[name]
    addresses = [f"http://images.test/{number}.png" for number in range(ROWS)]
    config = config_of(tmp_path, addresses, **{name: bound})
    asked: list[str] = []
    with pytest.raises(DataError, match=words):
        fetched(config, download=lambda address: (asked.append(address), png(1))[1])
    assert bool(asked) == (name != "max_fetched_images")
    if asked:
        assert fetched(config_of(tmp_path, addresses), download=lambda _: png(1)).before >= 1


def test_a_network_that_is_away_ends_the_step_soon(tmp_path: Path) -> None:
    addresses = [f"http://images.test/{number}.png" for number in range(1000)]

    def download(address: str) -> bytes:
        raise DownloadError("has a host without an address", is_final=False)

    with pytest.raises(UserError, match="none of the first 64 addresses could be fetched") as found:
        fetched(config_of(tmp_path, addresses), download=download)
    assert found.value.code == ExitCode.UNAVAILABLE
    assert not list((tmp_path / "root" / FOLDER).rglob("*.png")) and report(tmp_path)["failed"]
