"""The client for the server and account of the environment."""

from __future__ import annotations

import functools
import os

import boto3
from botocore.client import BaseClient
from botocore.config import Config
from botocore.model import OperationModel

from vlmpipe.trainer.storage.bucket import (
    REQUESTS,
)
from vlmpipe.trainer.storage.outage import SOON_S

CONNECT_S, READ_S = 10, 60
ATTEMPTS = 8  # of one request, with waits that double up to 20 s
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def default_client(attempts: int = ATTEMPTS, read_s: float = READ_S) -> BaseClient:
    endpoint = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")
    return _client_for(endpoint, os.environ.get("AWS_ACCESS_KEY_ID", ""), attempts, read_s)


def soon_client() -> BaseClient:
    return default_client(attempts=1, read_s=SOON_S)


@functools.cache
def _client_for(endpoint: str, access_key: str, attempts: int, read_s: float) -> BaseClient:
    """One client for each server and account: making one takes a tenth of a second."""
    session = boto3.Session()
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    settings = Config(
        connect_timeout=min(CONNECT_S, read_s),
        read_timeout=read_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        # Names of buckets are no host names of a server that is not Amazon's.
        s3={"addressing_style": "path" if endpoint else "auto"},
        # Our own CRC32C is in every request; the library's default, CRC32 after the body, older servers refuse.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = session.client("s3", endpoint_url=endpoint or None, region_name=region, config=settings)
    client.meta.events.register("after-call.s3", _count)
    return client


def _count(model: OperationModel, **_: object) -> None:
    """Count an answered call; the library's retries are not seen here."""
    if model.name.startswith(("Get", "Head")):
        REQUESTS.add(class_b=1)
    elif not model.name.startswith(("Delete", "Abort")):
        REQUESTS.add(class_a=1)
