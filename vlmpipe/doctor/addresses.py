"""Check whether what the run file names by an address is stored there, and lies in the run's region."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud import storage
from requests.exceptions import RequestException

from vlmpipe.access.needs import Named, named
from vlmpipe.access.table import load_table
from vlmpipe.config.run_config import RunConfig
from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import TIMEOUT_S, CannotSee
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.google_cloud.bucket_checks import READ_AT_STARTS, buckets_of, lies_in
from vlmpipe.google_cloud.bucket_checks import Named as NearBucket
from vlmpipe.google_cloud.client import no_credentials, reason_of
from vlmpipe.trainer.errors import UserError

if TYPE_CHECKING:
    from google.auth.credentials import Credentials


def address_rows(config: RunConfig, credentials: Credentials | None) -> Iterator[Row]:
    """A row for each address that must hold something, by listing one object, and for each bucket near the machines or
    mounted by them.
    """
    for field, uri in config.data.addresses().items():
        if uri.startswith("s3://"):
            yield _s3_address(field, uri)
    read = {
        bucket.value: bucket
        for bucket in named(config)
        if bucket.kind == "bucket" and bucket.row not in written_fields()
    }
    near = [bucket for bucket in buckets_of(config) if bucket.near or bucket.mounted]
    if not (read or near):
        return
    if credentials is None:
        for uri, place in read.items():
            yield unseen(
                "address", f"{place.field}: {uri}: Cloud Storage is asked with a login and a project of your own"
            )
        return
    client = storage.Client(project=config.gcp.project or "none", credentials=credentials)
    silent = ""
    for uri, place in read.items():
        try:
            yield (
                _address(client, config, place, uri)
                if not silent
                else unseen("address", f"{place.field}: {uri}: {silent}")
            )
        except CannotSee as error:
            silent = error.why
            yield unseen("address", f"{place.field}: {uri}: {error.why}", error.fix)
    for bucket in near:
        try:
            yield from _place(client, config, bucket) if not silent else ()
        except CannotSee as error:
            silent = error.why


def written_fields() -> frozenset[str]:
    """Fields below whose addresses a run makes everything itself."""
    return frozenset(name for line in load_table().fields if line.write for name in line.names)


def _address(client: storage.Client, config: RunConfig, place: Named, uri: str) -> Row:
    """List one object below `uri`. Raises CannotSee without an answer."""
    field, (bucket, _, path) = place.field, uri.removeprefix("gs://").partition("/")
    prefix = _before_pattern(path)
    try:
        result = list(client.list_blobs(bucket, prefix=prefix, max_results=1, timeout=TIMEOUT_S, retry=None))
    except exceptions.NotFound:
        fix = remedies.create_bucket(bucket, config.gcp.project or "PROJECT", config.gcp.location)
        return missing("address", f"{field}: there is no bucket {bucket}", f"{fix}\nor correct {field}")
    except (exceptions.Forbidden, exceptions.Unauthorized):
        fix = remedies.grant_on_bucket(bucket, "user:YOUR_ACCOUNT", "roles/storage.objectViewer")
        return unseen("address", f"{field}: your account may not list objects of gs://{bucket}", fix)
    except (RequestException, TransportError) as error:
        raise CannotSee(
            f"no answer from Cloud Storage within {TIMEOUT_S:g} s ({reason_of(error)})", "try again"
        ) from error
    except GoogleAuthError as error:
        login = no_credentials(error)
        raise CannotSee(login.found, login.fix) from error
    except exceptions.GoogleAPICallError as error:
        return unseen("address", f"{field}: Cloud Storage answers {error.code} for {uri}", "try again")
    if not result:
        return missing("address", f"{field}: nothing is stored under gs://{bucket}/{prefix}", f"correct {field}")
    return ok("address", f"{field}: {uri} is there")


def _place(client: storage.Client, config: RunConfig, near: NearBucket) -> Iterator[Row]:
    """Return whether a bucket lies in the run's region. Nothing where it is not there, which the rows of permissions
    say.
    """
    region = config.gcp.location
    try:
        bucket = client.get_bucket(near.bucket, timeout=TIMEOUT_S, retry=None)
    except exceptions.NotFound:
        return
    except (exceptions.Forbidden, exceptions.Unauthorized):
        fix = remedies.grant_on_bucket(near.bucket, "user:YOUR_ACCOUNT", "roles/storage.legacyBucketReader")
        yield unseen("bucket", f"{near.field}: whether gs://{near.bucket} lies in {region} is not known", fix)
        return
    except (RequestException, GoogleAuthError) as error:
        raise CannotSee(f"no answer from Cloud Storage within {TIMEOUT_S:g} s ({reason_of(error)})") from error
    except exceptions.GoogleAPICallError as error:
        yield unseen("bucket", f"{near.field}: Cloud Storage answers {error.code} for gs://{near.bucket}", "try again")
        return
    if lies_in(region, bucket):
        yield ok("bucket", f"{near.field}: gs://{near.bucket} lies in {bucket.location}, where {region} is")
        return
    if near.mounted:
        where = f"gs://{near.bucket} lies in {bucket.location}, {READ_AT_STARTS.format(region=region)}"
        yield ok("bucket", f"{near.field}: {where}")
        return
    where = f"gs://{near.bucket} lies in {bucket.location}, and the run in {region}"
    text = f"{near.field}: {where}: each byte is billed and slow"
    fix = remedies.create_bucket(f"{near.bucket}-{region}", config.gcp.project, region)
    yield missing("bucket", text, f"{fix}\nor set gcp.location to the bucket's region")


def _s3_address(field: str, uri: str) -> Row:
    from vlmpipe.trainer.storage.s3 import holds_objects  # its library comes with an extra

    try:
        result = holds_objects(_before_pattern(uri))
    except UserError as error:
        return unseen("address", f"{field}: {uri}: {error.found}", error.fix)
    if not result:
        return missing("address", f"{field}: nothing is stored at {uri}", f"correct {field}")
    return ok("address", f"{field}: {uri} exists")


def _before_pattern(path: str) -> str:
    """Part before the first wildcard or brace."""
    return re.split(r"[*?\[{]", path)[0]
