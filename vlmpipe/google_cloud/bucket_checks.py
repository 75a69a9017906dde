"""Checks, before a run starts, that its buckets exist, lie in its region and are accessible.

One request a bucket reads its metadata. If these may not be read, a second one, which needs no permission, asks what
this account may do there. Nothing is written, and no bucket is created.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud import storage
from requests.exceptions import RequestException

from vlmpipe.access.needs import named
from vlmpipe.google_cloud.client import LONGEST_MESSAGE_CHARS, no_credentials, reason_of
from vlmpipe.google_cloud.retries import request_timeout_s, retrying
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.outage import answering_soon

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

# Any of these shows that it is the intended bucket. What the jobs need there, their own accounts need.
ENOUGH = ("storage.objects.list", "storage.objects.get", "storage.objects.create")
READ_AT_STARTS = (
    "and the Cloud Run service in {region}: each start of an instance reads the model from there, which is billed and "
    "slow"
)
WITHOUT_CHECK = "--force skips the check of buckets"
# Fields whose bytes are written or read repeatedly, so that their bucket must lie where the machines are. A mirror lies
# elsewhere on purpose; weights and registered models are read once.
NEAR = (
    "gcp.pipeline_root", "output.root_uri", "data.source", "data.image_folder", "data.sources.[].uri",
    "data.sources.[].image_folder",
)  # fmt: skip
# https://docs.cloud.google.com/storage/docs/locations: regions of the predefined dual-regions, and how the names of a
# multi-region's regions begin; EU leaves out London and Zurich.
DUAL_REGIONS: dict[str, tuple[str, ...]] = {
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}
MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
# Fields whose buckets an instance of Cloud Run mounts, and reads whenever it starts.
MOUNTED = ("register.registry", "model.pretrained.weights")
OUTSIDE_EU = ("europe-west2", "europe-west6")


@dataclass(frozen=True)
class Named:
    """A bucket, and the first field of the run file that names it, preferably one of NEAR.

    mounted: instances of Cloud Run read it, and it is not `near`.
    """

    bucket: str
    field: str
    near: bool
    mounted: bool = False


def buckets_of(config: RunConfig) -> list[Named]:
    """The buckets that a run on Vertex AI opens, each once, in the order of the table of accesses."""
    result: dict[str, Named] = {}
    mounts = _mounted_fields(config)
    for resource in named(config):
        if resource.kind == "bucket":
            bucket = Named(resource.resource, resource.field, resource.row in NEAR, resource.row in mounts)
            known = result.get(resource.resource)
            if known is None or (bucket.near, bucket.mounted) > (known.near, known.mounted):
                result[resource.resource] = bucket
    return list(result.values())


def _mounted_fields(config: RunConfig) -> tuple[str, ...]:
    """Fields whose buckets instances mount: the base, too, if the model is an adapter."""
    if config.deploy is None or config.deploy.cloud_run is None:
        return ()
    return MOUNTED if config.model.exports_adapter else MOUNTED[:1]


def require_buckets(config: RunConfig) -> list[str]:
    """Check all buckets. Returns a sentence for each that could not be checked.

    Raises UserError for the first bucket that is missing (66), in another region (64) or closed to this account (77),
    where there are no credentials (67), and where Cloud Storage does not answer (69).
    """
    named, notes = buckets_of(config), list[str]()
    try:
        with answering_soon():
            client = storage.Client(project=config.gcp.project)
            for bucket in named:
                notes += _look_at(bucket, config, client)
    except (RequestException, TransportError) as error:
        raise _unanswered(reason_of(error)) from error
    except GoogleAuthError as error:
        raise no_credentials(error) from error
    except exceptions.GoogleAPICallError as error:
        raise _unanswered(f"{int(error.code or 0)} {_said(error)}") from error
    return notes


def _look_at(named: Named, config: RunConfig, client: storage.Client) -> list[str]:
    bucket, place = client.bucket(named.bucket), f"--project={config.gcp.project} --location={config.gcp.location}"
    patience: dict[str, object] = {"retry": None, "timeout": request_timeout_s()}
    here = f"the bucket of {named.field}, gs://{named.bucket},"
    try:
        retrying(lambda: bucket.reload(**patience))
    except exceptions.NotFound as error:
        raise UserError(
            f"{here} does not exist",
            expected=f"a bucket in {config.gcp.location}, made before: nothing was submitted",
            fix=f"gcloud storage buckets create gs://{named.bucket} {place} --uniform-bucket-level-access\n"
            f"or correct {named.field}",
            code=ExitCode.NOT_FOUND,
        ) from error
    except exceptions.Unauthorized as error:
        raise no_credentials(error) from error
    except exceptions.Forbidden as error:
        if retrying(lambda: bucket.test_iam_permissions(list(ENOUGH), **patience)):
            return [f"whether {here} lies in {config.gcp.location} is not known: its metadata may not be read"]
        raise UserError(
            f"{here} is closed to this account, or belongs to another project: {_said(error)}",
            expected="a bucket of your own (all of Google Cloud shares their names), which this account may see",
            fix=f"correct {named.field}, or: gcloud storage buckets add-iam-policy-binding gs://{named.bucket} "
            f"--member=user:YOUR_ACCOUNT --role=roles/storage.legacyBucketReader\n{WITHOUT_CHECK}",
            code=ExitCode.NO_PERMISSION,
        ) from error
    except exceptions.BadRequest as error:
        raise ConfigError(f"{here} cannot be a bucket: {_said(error)}", fix=f"correct {named.field}") from error
    if named.near and not lies_in(config.gcp.location, bucket):
        raise ConfigError(
            f"{here} lies in {bucket.location}, and the run in gcp.location {config.gcp.location}",
            expected="a bucket where the machines are: from elsewhere each byte is billed and slow",
            fix=f"set gcp.location to the bucket's region, or make one near the machines:\n"
            f"gcloud storage buckets create gs://{named.bucket}-{config.gcp.location} {place} "
            f"--uniform-bucket-level-access\n{WITHOUT_CHECK}",
        )
    if named.mounted and not lies_in(config.gcp.location, bucket):
        return [f"{here} lies in {bucket.location}, {READ_AT_STARTS.format(region=config.gcp.location)}"]
    return []


def lies_in(region: str, bucket: storage.Bucket) -> bool:
    """Return whether a bucket, whose metadata was read, has its bytes in `region`; also for places not known here."""
    location = str(bucket.location or region).lower()
    if bucket.location_type == "multi-region":
        begins = MULTI_REGIONS.get(location, "")
        return region.startswith(begins) and not (location == "eu" and region in OUTSIDE_EU)
    if bucket.location_type == "dual-region":
        chosen = [data_location.lower() for data_location in bucket.data_locations or ()]
        return region in (chosen or DUAL_REGIONS.get(location, (region,)))
    if bucket.location_type == "zone":
        return location.startswith(region)
    return location == region


def _unanswered(why: str) -> UserError:
    return UserError(
        f"Cloud Storage does not answer: {why}",
        expected="an answer, to check the run's buckets; nothing was submitted",
        fix=f"check network and proxy (HTTPS_PROXY), then try again; {WITHOUT_CHECK}",
        code=ExitCode.UNAVAILABLE,
    )


def _said(error: exceptions.GoogleAPICallError) -> str:
    return " ".join(error.message.split())[:LONGEST_MESSAGE_CHARS]
