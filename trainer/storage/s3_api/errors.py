"""Errors of the client library as errors for people, but a missing object and a condition that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from botocore import exceptions as boto

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.base import (
    changed_before_upload,
)

MISSING = ("NoSuchKey", "404")
ENDED = ("InvalidRange", "416")
CHANGED = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
CONDITION_FAILED = ("PreconditionFailed", "412")
BUSY = "ConditionalRequestConflict"  # another conditional write of the same object is under way
NO_PERMISSION = (401, 403)
UNANSWERED = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)  # after the last retry


class MissingError(Exception):
    """There is no such object."""


class EndedError(Exception):
    """The object ends before the range that was asked for."""


class ConditionError(Exception):
    """The condition of a write does not hold, or (`is_busy`) may not hold in a moment."""

    def __init__(self, is_busy: bool) -> None:
        super().__init__()
        self.is_busy = is_busy


def code_of(error: Exception) -> str:
    return str(error.response["Error"]["Code"]) if isinstance(error, boto.ClientError) else ""


@contextlib.contextmanager
def readable_errors(doing: str, uri: str) -> Iterator[None]:
    """Translate the client library's errors for people, except a missing object and a condition that fails."""
    try:
        yield
    except boto.ClientError as error:
        raise _of_answer(error, doing, uri) from error
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
        raise UserError(
            f"no usable S3 credentials while {doing} {uri}",
            expected="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine or pod",
            fix="aws configure, or set the variables; on Kubeflow, kubeflow.secret_env sets them",
            code=ExitCode.UNAVAILABLE,
        ) from error
    except UNANSWERED as error:
        raise unanswered(str(error), doing, uri) from error
    except (boto.ParamValidationError, ValueError) as error:  # such as an endpoint that is no address
        raise ConfigError(f"S3 cannot be asked for {doing} {uri}: {error}") from error


def _of_answer(error: boto.ClientError, doing: str, uri: str) -> Exception:
    code, status = code_of(error), int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))
    message = error.response["Error"].get("Message", "")
    if code in MISSING:
        return MissingError()
    if code in ENDED:
        return EndedError()
    if code in CONDITION_FAILED or code == BUSY:
        return ConditionError(code == BUSY)
    if code in CHANGED:
        return changed_before_upload(uri)
    if code == "NoSuchBucket":
        return UserError(
            f"the bucket of {uri} does not exist",
            expected="an existing bucket",
            fix="correct the name or AWS_ENDPOINT_URL_S3, or create the bucket",
            code=ExitCode.UNAVAILABLE,
        )
    if status in NO_PERMISSION or code in ("ExpiredToken", "InvalidToken"):
        return UserError(
            f"no permission while {doing} {uri}",
            expected="an account that may list the bucket and get, put and delete its objects",
            fix=f"grant it, or use another account. S3 says: {code}: {message}",
            code=ExitCode.NO_PERMISSION,
        )
    if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
        return unanswered(f"{code}: {message}", doing, uri)
    return ConfigError(f"S3 refused {doing} {uri}: {code}: {message}")


def unanswered(problem: str, doing: str, uri: str) -> UserError:
    return UserError(
        f"S3 did not answer properly while {doing} {uri}: {problem}",
        expected="an answer before the deadline",
        fix="check AWS_ENDPOINT_URL_S3 and the network, and try again; a run continues where it stood",
        code=ExitCode.UNAVAILABLE,
    )
