"""Errors for users from answers of the Hugging Face hub, and blocks in which no request is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from vlmpipe.trainer.errors import ExitCode, UserError

TOKEN = "set model.hub_token_secret or HF_TOKEN, or log in with hf auth login"


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


def hub_error(error: BaseException, name: str, revision: str, file: str) -> UserError | None:
    """The error for a request of `file` that failed; None for an error that does not come from the hub's client.

    Reads the causes of `error` too, because transformers wraps the client's errors.
    """
    from huggingface_hub import constants, errors

    at = f" at revision {revision}" if revision else ""

    def meant(found: str, fix: str, code: ExitCode = ExitCode.NOT_FOUND) -> UserError:
        return UserError(found, fix=fix, code=code)

    cause = _of_client(error)
    if cause is None:
        return None
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        why = f"{constants.ENDPOINT} does not answer"
        fix = "check the network and HF_ENDPOINT, or download the model once and give its folder"
        if _BLOCKS.open:
            why, fix = "the hub is not asked here", "download it once, or give a folder; a run asks the hub"
        elif constants.HF_HUB_OFFLINE:
            why, fix = "HF_HUB_OFFLINE is set", "unset it, or give a folder"
        return meant(f"{name}{at} is not on this machine, and {why}", fix, ExitCode.UNAVAILABLE)
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
    if isinstance(cause, errors.RepositoryNotFoundError):
        return meant(
            f"the hub has no model {name} that your token may read", f"correct the id; for a private model {TOKEN}"
        )
    if status in (401, 403):
        fix = "renew the token with hf auth login, or correct HF_TOKEN or model.hub_token_secret"
        return meant(f"the hub refuses your token for {name} (HTTP {status})", fix, ExitCode.NO_PERMISSION)
    why = f"HTTP {status}" if status else f"no answer ({type(cause).__name__})"
    fix = "try again, or check the network and HF_ENDPOINT"
    return meant(f"{name} cannot be looked up at {constants.ENDPOINT}: {why}", fix, ExitCode.UNAVAILABLE)


def _of_client(error: BaseException) -> BaseException | None:
    """The hub client's error among those that caused this one."""
    from huggingface_hub import errors

    known = (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, known):
        seen = seen.__cause__ or seen.__context__
    return seen
