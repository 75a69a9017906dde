"""The strict stand-in for Cloud Storage as a process of its own, so that it takes no time from what is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from vlmpipe.rehearsal.gcs_server import GcsServer

BUCKET = "bench"


@contextlib.contextmanager
def bucket_server() -> Iterator[storage.Client]:
    """A client of a server with one empty bucket, BUCKET."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # a server that cannot start ends the wait for its address
    try:
        yield storage.Client(
            project="bench", credentials=AnonymousCredentials(), client_options={"api_endpoint": ours.recv()}
        )
    finally:
        ours.send("stop")
        process.join()


def _serve(pipe: Connection) -> None:
    with GcsServer([BUCKET]) as server:
        pipe.send(server.endpoint)
        pipe.recv()
