"""Files of the Hugging Face hub with errors for users from its answers, and blocks in which no request is sent."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

TOKEN = "set model.hub_token_secret or HF_TOKEN, or log in with hf auth login"
LACKING = re.compile(r"file\(s\) are missing \((.+?)\)\. ")  # in the client's words for an incomplete snapshot
INCOMPLETE = "Consistency check failed"  # the client's words for a file of another size than announced


class _Blocks:
    """Blocks without the hub, in all threads, and the client's own setting before the first one."""

    def __init__(self) -> None:
        self.lock, self.open, self.before = threading.Lock(), 0, False


_BLOCKS = _Blocks()


@contextlib.contextmanager
def without_hub() -> Iterator[None]:
    """Let the hub's client ask nothing inside the block: it reads its cache, and anything else fails at once.

    Without a network it would retry each request for half a minute. Holds for all threads; processes that are started
    meanwhile ask as ever.
    """
    from huggingface_hub import constants

    with _BLOCKS.lock:
        if not _BLOCKS.open:
            _BLOCKS.before = constants.HF_HUB_OFFLINE
        _BLOCKS.open += 1
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _BLOCKS.lock:
            _BLOCKS.open -= 1
            if not _BLOCKS.open:
                constants.HF_HUB_OFFLINE = _BLOCKS.before


def file_on_hub(name: str, revision: str, file: str, timeout_s: float = 10.0) -> HfFileMetadata:
    """Commit, checksum and size of a file. Raises the client's errors.

    FileMetadataError for an answer without them, as the client's downloads do: what answers is not the hub, such as a
    proxy with a page of its own.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import FileMetadataError

    metadata = get_hf_file_metadata(hf_hub_url(name, file, revision=revision or None), timeout=timeout_s)
    if None in (metadata.commit_hash, metadata.etag, metadata.size):
        raise FileMetadataError(f"the answer for {file} lacks commit, checksum or size")
    return metadata


def whole_snapshot(name: str, revision: str, files: Sequence[str], left_out: Sequence[str] = ()) -> Path:
    """The folder of a repository's files at one commit, by patterns of their names, downloaded first if needed.

    Raises UserError where the hub does not answer, unless this machine knows that it has all of them, or the hub is not
    to be asked.
    """
    from huggingface_hub import constants, snapshot_download

    download = functools.partial(
        snapshot_download, name, revision=revision or None, allow_patterns=files, ignore_patterns=left_out
    )
    with readable_hub_errors(name, revision, files[0]):
        folder = Path(download())
        if constants.HF_HUB_OFFLINE or _is_listed(name, folder.name):
            return folder
        # The client passed over a failure of the hub, and took what is here, which may lack any file. A dry run raises.
        download(dry_run=True)
        return Path(download())


def _is_listed(name: str, commit: str) -> bool:
    """Return whether the list of the commit's files is here, by which the client knows that none is missing."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(name, revision=commit)
    except CachedRepoTreeNotFoundError:
        return False
    return True


@contextlib.contextmanager
def readable_hub_errors(name: str, revision: str, file: str) -> Iterator[None]:
    """Re-raise what the hub's client raises inside the block as a UserError."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError, ValueError, RuntimeError) as error:
        if known := hub_error(error, name, revision, file):
            raise known from error
        raise


def hub_error(error: BaseException, name: str, revision: str, file: str) -> UserError | None:
    """The error for a request of `file` that failed; None for an error that does not come from the hub's client.

    Reads the causes of `error` too, because transformers and the client itself replace errors by others.
    """
    from huggingface_hub import constants, errors

    def meant(problem: str, fix: str, code: ExitCode = ExitCode.NOT_FOUND) -> UserError:
        return UserError(problem, fix=fix, code=code)

    if (cause := _of_client(error)) is None:
        return None
    at = f" at revision {revision}" if revision else ""
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.DryRunError):
        here, may_be_here = "is not on this machine", True
        if isinstance(cause, errors.IncompleteSnapshotError):
            lacking = LACKING.search(str(cause))
            here, may_be_here = f"is here without {lacking[1] if lacking else 'some files'}", False
        elif isinstance(cause, errors.DryRunError):
            here = "may be here in part only"
        if _BLOCKS.open:
            why, fix = "the hub is not asked here", "download it once, or give a folder; a run asks the hub"
        elif constants.HF_HUB_OFFLINE:
            why, fix = "HF_HUB_OFFLINE is set", "unset it, or give a folder"
        else:
            why = f"{constants.ENDPOINT} does not answer"
            fix = "check the network and HF_ENDPOINT; a model that was downloaded before is read with HF_HUB_OFFLINE=1"
            if not may_be_here:
                fix = "check the network and HF_ENDPOINT"
        return meant(f"{name}{at} {here}, and {why}", fix, ExitCode.UNAVAILABLE)
    if isinstance(cause, errors.GatedRepoError):
        if status == 401:
            return meant(f"{name} is gated, and no valid token was sent", TOKEN, ExitCode.NO_PERMISSION)
        fix = f"accept its terms at {constants.ENDPOINT}/{name} with the account of the token"
        return meant(f"{name} is gated, and your account has no access", fix, ExitCode.NO_PERMISSION)
    if isinstance(cause, errors.RevisionNotFoundError):
        fix = f"choose one of {constants.ENDPOINT}/{name}/commits/main"
        return meant(f"{name} has no revision {revision or 'main'}", fix)
    if isinstance(cause, errors.EntryNotFoundError):
        return meant(f"{name}{at} has no {file}", "give a model in transformers' format")
    if isinstance(cause, errors.DisabledRepoError):
        return meant(f"{name} is disabled on the hub, for every account", "choose another model, or give a folder")
    if isinstance(cause, errors.RepositoryNotFoundError):
        return meant(
            f"the hub has no model {name} that your token may read", f"correct the id; for a private model {TOKEN}"
        )
    if status in (401, 403):
        fix = "renew the token with hf auth login, or correct HF_TOKEN or model.hub_token_secret"
        return meant(f"the hub refuses your token for {name} (HTTP {status})", fix, ExitCode.NO_PERMISSION)
    why, fix = f"no answer ({type(cause).__name__})", "try again, or check the network and HF_ENDPOINT"
    if isinstance(cause, errors.FileMetadataError):
        why, fix = "what answers there is not the hub", "check HF_ENDPOINT and the network's proxy"
    elif isinstance(cause, OSError) and str(cause).startswith(INCOMPLETE):
        why, fix = "a file arrives with another size than announced", "try again, or check the network's proxy"
    elif status == 429:
        wait = re.search(r"t=(\d+)", cause.response.headers.get("RateLimit", ""))  # type: ignore[attr-defined]
        why = "HTTP 429, too many requests"
        fix = f"try again in {wait[1] if wait else 300} seconds; with a token the hub allows more: {TOKEN}"
    elif status:
        why = f"HTTP {status}"
    return meant(f"{name} cannot be read from {constants.ENDPOINT}: {why}", fix, ExitCode.UNAVAILABLE)


def _of_client(error: BaseException) -> BaseException | None:
    """The hub client's error among those that caused this one: an answer of the hub before the client's own errors."""
    from huggingface_hub import errors

    errors_of_hub = (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.DryRunError)
    causes: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None:
        causes.append(seen)
        seen = seen.__cause__ or seen.__context__
    answers = [cause for cause in causes if isinstance(cause, errors.HfHubHTTPError | errors.FileMetadataError)]
    others = [cause for cause in causes if isinstance(cause, errors_of_hub) or str(cause).startswith(INCOMPLETE)]
    return next(iter(answers + others), None)
