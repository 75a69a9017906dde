"""Files in folders, on Cloud Storage and on S3."""

from vlmpipe.trainer.confinement.limits import require_address
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import MISTYPED, Storage, in_bucket
from vlmpipe.trainer.storage.local import LocalStorage


def open_storage(root_uri: str) -> Storage:
    """The store behind a local path, a `file://` path, `gs://bucket/path` or `s3://bucket/path`.

    Raises ConfigError for another scheme, and for one with a single slash after it.
    """
    if match := MISTYPED.match(root_uri):
        raise ConfigError(
            f"storage {root_uri!r} is no address", expected=f"{match[0].lower()}//... with two slashes, or a local path"
        )
    if in_bucket(root_uri):
        require_address(root_uri)
    if root_uri.startswith("gs://"):
        from vlmpipe.trainer.storage.gcs import GcsStorage

        return GcsStorage(root_uri)
    if root_uri.startswith("s3://"):
        from vlmpipe.trainer.storage.s3 import S3Storage

        return S3Storage(root_uri)
    if "://" in root_uri and not root_uri.startswith("file://"):
        raise ConfigError(
            f"storage {root_uri!r} has an unknown scheme", expected="a local path, gs://bucket/path or s3://bucket/path"
        )
    return LocalStorage(root_uri.removeprefix("file://"))
