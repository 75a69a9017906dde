"""Reads secrets from Secret Manager where they are used; run files, specs and logs hold only resource names."""

from __future__ import annotations

import base64
import binascii
import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.redaction import SECRETS_VARIABLE

if TYPE_CHECKING:
    import requests

SECRET_NAME = r"(projects/[^/]+/secrets/[^/]+)(/versions/[^/]+)?"
SECRET_MANAGER = "https://secretmanager.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIMEOUT_S = 10.0
ATTEMPTS, PAUSE_S = 3, 1.0  # for an answer that Secret Manager is busy; all nodes of a job ask at once
BUSY = (429, 500, 502, 503, 504)
HUB_TOKEN_VARIABLE = "HF_TOKEN"


class SecretNotRead(Exception):
    """Says why a secret cannot be read, without revealing it."""


def read_secret(name: str, *, timeout_s: float = TIMEOUT_S, attempts: int = ATTEMPTS) -> str:
    """The secret's text, of the newest version unless the name has one. Each attempt takes at most `timeout_s`.

    Raises SecretNotRead, or requests.RequestException and GoogleAuthError without an answer.
    """
    match = re.fullmatch(SECRET_NAME, name)
    if not match:
        raise SecretNotRead("it is not named projects/PROJECT/secrets/NAME")
    url = f"{SECRET_MANAGER}/v1/{match[1]}{match[2] or '/versions/latest'}:access"
    session = google_session(SECRET_MANAGER)
    for attempt in range(attempts):
        answer = session.get(url, timeout=timeout_s)
        if answer.status_code not in BUSY or attempt == attempts - 1:
            break
        time.sleep(PAUSE_S * 2**attempt)
    if answer.status_code == 403:
        need = "the service account needs roles/secretmanager.secretAccessor"
        raise SecretNotRead(f"no permission to read {match[1]}; {need}")
    if answer.status_code != 200:
        raise SecretNotRead(f"Secret Manager answers {answer.status_code} for {match[1]}")
    try:
        return base64.b64decode(answer.json()["payload"]["data"]).decode().strip()
    except (ValueError, KeyError, binascii.Error) as error:
        raise SecretNotRead(f"{match[1]} holds no text") from error


def use_hub_token(secret: str | None) -> None:
    """Let this process and its children read the hub with the token that `secret` holds, if one is named.

    Raises UserError (exit 77 or 69) that says why it cannot be read.
    """
    if secret:
        os.environ[HUB_TOKEN_VARIABLE] = _read_for("model.hub_token_secret", secret)


def upload_token(secret: str | None) -> str:
    """The hub's token for uploads, which `secret` holds; without one that of the environment. Empty where neither is.

    Raises UserError (exit 77 or 69) that says why it cannot be read.
    """
    return _read_for("register.hub.token_secret", secret) if secret else os.environ.get(HUB_TOKEN_VARIABLE, "")


def use_secrets(secrets: Mapping[str, str]) -> None:
    """Put each secret into its variable, for this process and its children, and hide it in what they print.

    A variable that is set already is kept: on one's own machine it takes the secret's place.

    Args:
        secrets: the run file's: variable -> the secret's resource name with a version.

    Raises UserError (exit 77 or 69) that says which one cannot be read, and why.
    """
    for variable, name in secrets.items():
        if not os.environ.get(variable):
            fix = f"correct secrets.{variable} or the role; on your own machine, {variable} in the environment will do"
            os.environ[variable] = _read_for(f"secrets.{variable}", name, fix=fix)
    if secrets:
        os.environ[SECRETS_VARIABLE] = ",".join(secrets)


def _read_for(field: str, name: str, *, fix: str = "") -> str:
    import requests
    from google.auth.exceptions import GoogleAuthError

    try:
        return read_secret(name)
    except SecretNotRead as error:
        raise UserError(f"{field}: {error}", fix=fix, code=ExitCode.NO_PERMISSION) from error
    except (requests.RequestException, GoogleAuthError) as error:
        why = f"Secret Manager gives no answer ({type(error).__name__})"
        raise UserError(f"{field}: {why}", fix=fix, code=ExitCode.UNAVAILABLE) from error


def google_session(address: str) -> requests.Session:
    """A session with this process's Google credentials, or without any for a test server on this machine."""
    import google.auth
    import requests
    from google.auth.transport.requests import AuthorizedSession

    if address.startswith("http://127.0.0.1:"):
        return requests.Session()
    credentials, _ = google.auth.default(scopes=[SCOPE])
    return AuthorizedSession(credentials)
