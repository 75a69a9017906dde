"""The run file's `notify` section: notifications when a run ends."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field

from vlmpipe.config.validation_errors import Problem, ProblemsError
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.secret_detection import form_of_secret, is_secret_name
from vlmpipe.trainer.secret_manager import SECRET_NAME

MAX_RECIPIENTS = 3  # of Google's notification component
# Whoever knows an address of these services can post to it.
SECRET_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "chat.googleapis.com",
                "logic.azure.com", "hooks.zapier.com", "maker.ifttt.com")  # fmt: skip
LONGEST_PLAIN_PART = 24
_SIGNATURES = ("sig", "key", "code", "auth", "signature", "access_token")
_LOCAL = ("localhost", "127.0.0.1")

_EMAIL = re.compile(r"[^@\s,;]+@[^@\s,;]+\.[^@\s,;.]+")


def _recipients(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        if not _EMAIL.fullmatch(address):
            raise ValueError(f"{address!r} is not an e-mail address such as team@example.com")
    return addresses


def _webhook(text: str) -> str:
    """An address without secrets, or the resource name of a secret. The value is not repeated: errors are logged."""
    if not text or re.fullmatch(SECRET_NAME, text):
        return text
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise _refused("expected an https:// address, or projects/PROJECT/secrets/NAME in Secret Manager")
    if parts.scheme == "http" and parts.hostname not in _LOCAL:
        raise _refused("expected https://: http:// is not encrypted")
    if why := _secret_part(text):
        raise _refused(
            f"the address holds a secret ({why}), and everybody who may see the pipeline can read it; put it into "
            "Secret Manager (gcloud secrets create NAME --data-file=-) and give projects/PROJECT/secrets/NAME"
        )
    return text


def _refused(text: str) -> ProblemsError:
    """An error without the value, which a ValueError would quote."""
    return ProblemsError([Problem("notify.webhook", text)])


def _secret_part(address: str) -> str:
    """Reason why the address is a secret; empty if it is none."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.username or parts.password:
        return "a user name or password"
    if any(host == secret_host or host.endswith(f".{secret_host}") for secret_host in SECRET_HOSTS):
        return f"{host} takes the address itself as proof of identity"
    for name, value in parse_qsl(parts.query):
        if is_secret_name(name) or name.lower() in _SIGNATURES or form_of_secret(value):
            return f"the query's {name}"
    if form := form_of_secret(address):
        return form
    words = re.split(r"[/.;]", parts.path)
    if any(len(word) > LONGEST_PLAIN_PART and any(map(str.isdigit, word)) for word in words):
        return "a long part of its path"
    return ""


class NotifyConfig(Section):
    """Receivers of a message when a run ends. Compiled into the pipeline; nothing here changes a run's result."""

    email: Annotated[tuple[str, ...], AfterValidator(_recipients)] = Field(
        default=(),
        max_length=MAX_RECIPIENTS,
        description="E-mail addresses, at most 3, that Vertex AI notifies when a run ends. Vertex AI only.",
    )
    webhook: Annotated[str, AfterValidator(_webhook)] = Field(
        "",
        description="Address of a JSON message when a run ends: an https:// address without a secret in it, or "
        "projects/PROJECT/secrets/NAME, a Secret Manager secret that holds the address; empty for none.",
    )
