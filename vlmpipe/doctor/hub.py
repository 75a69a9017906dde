"""Check whether the run's models are on the Hugging Face hub, at their revisions, and may be read."""

from __future__ import annotations

import os
from collections.abc import Iterator

from huggingface_hub import constants, errors

from vlmpipe.doctor.google_api import TIMEOUT_S, CannotSee
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.secret_manager import HUB_TOKEN_VARIABLE, SecretNotRead, read_secret
from vlmpipe.trainer.storage.hub.client import file_on_hub, hub_error
from vlmpipe.trainer.storage.model_folders import bucket_address
from vlmpipe.trainer.storage.user_folders import expanded


def hub_rows(model: ModelConfig) -> Iterator[Row]:
    """A row for each model and tokenizer on the hub, by one request for its smallest file's header."""
    requested = [
        (f"model.{name}", part.weights, part.revision, "config.json")
        for name, part in model.sources.items()
        if part and _is_on_hub(part.weights)
    ]
    if not model.tokenizer.startswith("train:") and _is_on_hub(model.tokenizer):
        requested.append(("model.tokenizer", model.tokenizer, model.tokenizer_source.revision, "tokenizer_config.json"))
    if requested and model.hub_token_secret:
        yield _token(model.hub_token_secret)
    silent = ""
    for field, name, revision, file in requested:
        try:
            yield _hub_file(field, name, revision, file) if not silent else unseen("hub", f"{field}: {name}: {silent}")
        except CannotSee as error:  # the others are not waited for
            silent = error.why
            yield unseen("hub", f"{field}: {name}: {silent}", error.fix)


def _is_on_hub(name: str) -> bool:
    is_place = name.startswith((".", "/", "~")) or bool(bucket_address(name)) or expanded(name).is_dir()
    return bool(name) and not is_place


def _token(secret: str) -> Row:
    """Look up with the token that the jobs will have, where this account may read it."""
    import requests
    from google.auth.exceptions import GoogleAuthError

    try:
        os.environ[HUB_TOKEN_VARIABLE] = read_secret(secret, timeout_s=TIMEOUT_S, attempts=1)
    except (SecretNotRead, requests.RequestException, GoogleAuthError) as error:
        why = str(error) if isinstance(error, SecretNotRead) else f"no answer ({type(error).__name__})"
        return unseen("hub", f"model.hub_token_secret: {why}; here the hub is asked with your own token")
    return ok("hub", f"model.hub_token_secret: {secret} can be read")


def _hub_file(field: str, name: str, revision: str, file: str) -> Row:
    """Ask for a file's header with the user's token: this shows that it may be downloaded. Raises CannotSee."""
    at = f" at revision {revision}" if revision else ""
    try:
        file_on_hub(name, revision, file, TIMEOUT_S)
    except errors.OfflineModeIsEnabled:
        return unseen("hub", f"{field}: HF_HUB_OFFLINE is set, so {name} is not looked up", "unset HF_HUB_OFFLINE")
    except errors.HFValidationError:
        return missing("hub", f"{field}: {name} is no hub id", "give a folder, or an id such as Qwen/Qwen2.5-0.5B")
    except (errors.HfHubHTTPError, errors.FileMetadataError) as error:
        known = hub_error(error, name, revision, file)
        assert known
        if known.code == ExitCode.UNAVAILABLE:
            return unseen("hub", f"{field}: {known.found}", known.fix)
        return missing("hub", f"{field}: {known.found}", known.fix)
    except errors.HTTPError as error:
        why = f"no answer within {TIMEOUT_S:g} s ({type(error).__name__})"
        fix = "try again, or check the network and HF_ENDPOINT"
        raise CannotSee(f"{constants.ENDPOINT} cannot be asked: {why}", fix) from error
    return ok("hub", f"{field}: {name}{at} may be read")
