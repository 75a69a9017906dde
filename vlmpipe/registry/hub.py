"""Uploads a registered model to the Hugging Face hub: the registry's files and the card, in one commit.

The token is HF_TOKEN or a secret of its own: one that may write is not handed to the jobs, as `secrets` are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.output import HubConfig
from vlmpipe.records.registered import Registered, Uploaded
from vlmpipe.trainer.confinement.limits import HUB, require_address
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.secret_manager import HUB_TOKEN_VARIABLE, upload_token
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import MARKER

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Files of an earlier model that would be loaded with the new one: another number of shards, an adapter's configuration.
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")
MAX_NAMED = 5  # files in a message


def upload_registered(run_uri: str) -> str:
    """Upload the run's registered model to the repository of `register.hub`, and note the commit in registered.json.

    Returns the commit's address; an empty text without `register.hub`. Safe to repeat: a repository that has these very
    files gets no new commit.

    Raises ConfigError for a run that is not registered or a model that the hub refuses, UserError (66, 69 or 77) for a
    token or repository that it refuses, or no answer.
    """
    store = open_storage(run_uri)
    settings = RunSettings.read(store)
    hub = settings.register_.hub
    if hub is None:
        return ""
    registered = Registered.read_if_there(store)
    if registered is None:
        raise ConfigError(f"no {store.uri(Registered.FILE)}", expected="a registered model", fix="register it first")
    token = require_token(hub)
    model = open_storage(registered.uri)
    # The marker names folders of this run, which have no use on the hub, and no program there reads it.
    files = {info.name: model.fetch(info.name) for info in model.list() if info.name != MARKER}
    message = f"{registered.model} version {registered.version}, run {settings.run.run_id}"
    commit, address = _upload(hub, token, files, message)
    uploaded = Uploaded(repo_id=hub.repo_id, revision=hub.revision, commit=commit)
    registered.model_copy(update={"hub": uploaded}).write(store)
    return address


def require_token(hub: HubConfig) -> str:
    """The token to upload with. Raises UserError (exit 77 or 69) where there is none, or its secret cannot be read."""
    token = upload_token(hub.token_secret)
    if not token:
        raise UserError(
            f"no token to upload to {hub.repo_id}: {HUB_TOKEN_VARIABLE} is not set",
            expected="a token of the hub that may write to the repository",
            fix=f"name its secret in register.hub.token_secret, or set {HUB_TOKEN_VARIABLE} on your own machine",
            code=ExitCode.NO_PERMISSION,
        )
    return token


def _upload(hub: HubConfig, token: str, files: Mapping[str, Path], message: str) -> tuple[str, str]:
    """Commit and address of the revision that now has these files, and no others of a model."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HTTPError  # the base of all that its client raises

    require_address(HUB)
    api = HfApi(token=token)
    try:
        api.create_repo(hub.repo_id, private=hub.private, exist_ok=True)
        if hub.revision != "main":
            api.create_branch(hub.repo_id, branch=hub.revision, exist_ok=True)
        head = api.model_info(hub.repo_id, revision=hub.revision)
        if hub.private and not head.private:
            raise UserError(
                f"{hub.repo_id} is public, and register.hub.private is true",
                expected="a private repository, which is what a missing one is made as",
                fix="make it private on the hub, or set register.hub.private: false",
            )
        stale = _stale([file.rfilename for file in head.siblings or ()], files)
        done = api.create_commit(
            hub.repo_id,
            [
                *(CommitOperationAdd(name, path) for name, path in files.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=message,
            revision=hub.revision,
            parent_commit=head.sha,  # of two runs at once, the second is refused instead of mixing their files
        )
        there = {file.rfilename for file in api.model_info(hub.repo_id, revision=done.oid).siblings or ()}
    except (HTTPError, ConnectionError, RuntimeError, ValueError) as error:
        known = _upload_error(api, hub, error)
        if known is None:
            raise
        raise known from error
    if left_out := sorted(files.keys() - there):  # the client skips what a .gitignore names, and logs it only
        raise ConfigError(
            f"{api.endpoint}/{hub.repo_id} lacks {len(left_out)} of {len(files)} files of the model after its commit: "
            + ", ".join(left_out[:MAX_NAMED]),
            expected="a repository whose .gitignore names no file of a model",
            fix="remove these names or patterns from its `.gitignore`, and run the step again",
        )
    return done.oid, str(done.commit_url)


def _stale(there: Iterable[str], files: Mapping[str, Path]) -> list[str]:
    """Return the former model's files. Folders, licences and images are left: they may be the user's own."""
    return sorted(name for name in there if "/" not in name and name.endswith(MODEL_SUFFIXES) and name not in files)


def _upload_error(api: HfApi, hub: HubConfig, error: Exception) -> UserError | None:
    """Translate the client's error; None where it is none of the hub's."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    repository = f"{api.endpoint}/{hub.repo_id}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):  # an upload's error is wrapped
        cause = cause.__cause__
    if cause is None:
        if isinstance(error, OfflineModeIsEnabled):
            return UserError(
                f"cannot upload to {repository}: HF_HUB_OFFLINE is set", fix="unset it", code=ExitCode.UNAVAILABLE
            )
        is_known = not isinstance(error, RuntimeError | ValueError)
        return _no_answer(repository, type(error).__name__) if is_known else None
    status = cause.response.status_code
    message = " ".join(str(cause.server_message or "").split())[:200]
    why = f"HTTP {status}" + (f", {message}" if message else "")
    if status in (401, 403):
        return UserError(
            f"the hub refuses to write to {repository} with this token ({why})",
            expected="a token whose account may write there",
            fix=f"correct register.hub.repo_id, or give another token in {HUB_TOKEN_VARIABLE} or "
            "register.hub.token_secret",
            code=ExitCode.NO_PERMISSION,
        )
    if status == 404:
        return UserError(
            f"the hub has no {repository} at revision {hub.revision} ({why})",
            expected="a repository of an account or organisation that exists",
            fix="correct register.hub",
            code=ExitCode.NOT_FOUND,
        )
    if status in (409, 412):
        return UserError(
            f"{repository} changed during the upload ({why})",
            expected="no other commit meanwhile",
            fix="run the step again",
            code=ExitCode.UNAVAILABLE,
        )
    if status < 500 and status != 429:
        return ConfigError(f"the hub refuses the model for {repository} ({why})", fix="correct what it names")
    return _no_answer(repository, why)


def _no_answer(repository: str, why: str) -> UserError:
    return UserError(
        f"cannot upload to {repository}: {why}",
        expected="a hub that answers",
        fix="run the step again later, or check the network and HF_ENDPOINT; the model is registered already",
        code=ExitCode.UNAVAILABLE,
    )
