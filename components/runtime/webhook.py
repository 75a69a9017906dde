"""Notifies a webhook of how a run ended. A failure here is reported and never changes the run's result.

The webhook's address is usually a secret, so it is never printed. It stands in the run file only if it holds no secret;
otherwise it is read from Secret Manager by the step's own service account.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import quote, urlsplit

from vlmpipe.runs.ending import Ending
from vlmpipe.trainer.secret_manager import SECRET_NAME, SecretNotRead, read_secret

TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0)  # before the second and the third attempt
LONGEST_ERROR_CHARS = 300


class DeliveryError(Exception):
    """Why the message was not delivered, without the address."""


def send_notification(webhook: str, run_uri: str, ending: Ending) -> str:
    """Post a message about the run; a sentence about how that went, and "" without a webhook.

    Args:
        webhook: an address, or the resource name of a Secret Manager secret that holds one.
    """
    if not webhook:
        return ""
    import requests
    from google.auth.exceptions import GoogleAuthError

    try:
        address = read_secret(webhook) if re.fullmatch(SECRET_NAME, webhook) else webhook
        return f"webhook notified ({_post(address, body_for(address, message_of(run_uri, ending)))})"
    except (DeliveryError, SecretNotRead) as problem:
        return f"webhook NOT notified: {problem}"
    except (requests.RequestException, GoogleAuthError, ValueError) as problem:  # their texts may hold the address
        return f"webhook NOT notified: {type(problem).__name__}"


def message_of(run_uri: str, ending: Ending) -> dict[str, object]:
    """The message about a run."""
    message: dict[str, Any] = {"run_id": run_uri.rpartition("/")[2], "outcome": ending.outcome, "run_uri": run_uri}
    error = (ending.error.strip().splitlines() or [""])[0][:LONGEST_ERROR_CHARS]
    if ending.outcome == "failed" or ending.step:
        message |= {"step": ending.step or None, "exit_code": ending.exit_code, "error": error}
    if ending.decision:
        message |= {"accepted": ending.decision.accepted, "reason": ending.decision.reason}
        message["version"] = ending.version
    if ending.note:
        message["note"] = ending.note
    where = f" in {ending.step}" if ending.step else ""
    text = ". ".join(filter(None, [message.get("error") or message.get("reason") or "", ending.note]))
    link = link_of(f"{run_uri}/report.html")
    message["text"] = f"Run {message['run_id']}: {ending.outcome}{where}{f'. {text}' if text else ''}\n{link}"
    return message


def link_of(uri: str) -> str:
    """The address for a browser of a file in a bucket of Google's; any other as it is."""
    if not uri.startswith("gs://"):
        return uri
    return f"https://storage.cloud.google.com/{quote(uri.removeprefix('gs://'), safe='/')}"


def body_for(address: str, message: dict[str, object]) -> dict[str, object]:
    """The message in the receiver's form: chat services accept only a text."""
    host = urlsplit(address).hostname or ""
    if host.endswith("discord.com"):
        return {"content": message["text"]}
    if host.endswith(("chat.googleapis.com", "hooks.slack.com", "webhook.office.com")):
        return {"text": message["text"]}
    return message


def _post(address: str, body: dict[str, object]) -> str:
    """The status. An answer of 5xx or 429 and a broken connection are tried again, a timeout is not."""
    import requests

    problem = ""
    for pause_s in (*PAUSES_S, None):
        try:
            answer = requests.post(address, json=body, timeout=TIMEOUT_S, allow_redirects=False)
        except requests.Timeout as error:
            raise DeliveryError(f"no answer within {TIMEOUT_S:g} s") from error
        except requests.ConnectionError:
            problem = "the connection failed"
        else:
            if answer.status_code < 300:
                return str(answer.status_code)
            problem = f"it answers {answer.status_code}"
            if answer.status_code < 500 and answer.status_code != 429:
                break
        if pause_s is not None:
            time.sleep(pause_s)
    raise DeliveryError(problem)
