"""Notifies a webhook of how a run ended. A failure here is reported and never changes the run's result.

The webhook's address is usually a secret, so it is never printed. It stands in the run file only if it holds no secret;
otherwise it is read from Secret Manager by the step's own service account.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import UserError
from trainer.secret_manager import SECRET_NAME, SecretNotRead, read_secret
from trainer.storage import open_storage
from trainer.storage.base import Storage
from trainer.storage.records import unseal
from vlmpipe.config.sections.stages import earlier_stages

TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0)  # before the second and the third attempt
LONGEST_ERROR_CHARS = 300
OUTCOMES = {"SUCCEEDED": "done", "FAILED": "failed", "CANCELLED": "stopped", "stopped": "stopped"}


class DeliveryError(Exception):
    """Why the message was not delivered, without the address."""


def send_notification(webhook: str, run_uri: str, state: str, error: str = "") -> str:
    """Post a message about the run; a sentence about how that went, and "" without a webhook.

    Args:
        webhook: an address, or the resource name of a Secret Manager secret that holds one.
        state: the pipeline's final state, or "stopped".
        error: the service's own message, for a failure without a step's record.
    """
    if not webhook:
        return ""
    import requests
    from google.auth.exceptions import GoogleAuthError

    try:
        message = message_of(run_uri, state, error)
        address = read_secret(webhook) if re.fullmatch(SECRET_NAME, webhook) else webhook
        return f"webhook notified ({_post(address, body_for(address, message))})"
    except (DeliveryError, SecretNotRead) as problem:
        return f"webhook NOT notified: {problem}"
    except UserError as problem:  # of the run's storage
        return f"webhook NOT notified: {problem.found.splitlines()[0]}"
    except (requests.RequestException, GoogleAuthError, ValueError) as problem:  # their texts may hold the address
        return f"webhook NOT notified: {type(problem).__name__}"


def message_of(run_uri: str, state: str, error: str = "") -> dict[str, Any]:
    """The message, from the files of a run that may have ended anywhere."""
    stages = {stage: open_storage(uri) for stage, uri in {**earlier_stages(run_uri), "": run_uri}.items()}
    began_s = _content(next(iter(stages.values())), "steps/resolve-run.json").get("started_s", 0)  # this attempt
    outcome = OUTCOMES.get(state, state.lower())
    message: dict[str, Any] = {"run_id": run_uri.rpartition("/")[2], "outcome": outcome, "run_uri": run_uri}
    if outcome == "failed":
        records = [
            {"stage": stage, "started_s": 0, **_content(store, info.name)}
            for stage, store in stages.items()
            for info in store.list("steps")
        ]
        failed = [one for one in records if one.get("state") == "failed" and one["started_s"] >= began_s]
        first = min(failed, key=lambda one: one["started_s"], default={})
        reason = str(first.get("message") or error).strip()
        step = "-".join(filter(None, [first.get("stage"), first.get("step")]))
        message |= {"step": step or None, "exit_code": (first.get("detail") or {}).get("exit_code")}
        message["error"] = (reason.splitlines() or [""])[0][:LONGEST_ERROR_CHARS]
    decides = {stage: _content(store, "steps/decide.json") for stage, store in stages.items()}
    decided = [stages[stage] for stage, record in decides.items() if record.get("started_s", 0) >= began_s]
    if outcome == "done" and decided and (decision := _content(decided[-1], "decision.json")):
        message |= {"accepted": decision.get("accepted"), "reason": decision.get("reason")}
        message["version"] = _content(decided[-1], "registered.json").get("version")
    where = f" in {message['step']}" if message.get("step") else ""
    why = message.get("error") or message.get("reason") or ""
    # The report, for a browser where it lies in a bucket.
    link = f"{run_uri}/report.html".replace("gs://", "https://storage.cloud.google.com/", 1)
    message["text"] = f"Run {message['run_id']}: {outcome}{where}{f'. {why}' if why else ''}\n{link}"
    return message


def body_for(address: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message in the receiver's form: chat services accept only a text."""
    host = urlsplit(address).hostname or ""
    if host.endswith("discord.com"):
        return {"content": message["text"]}
    if host.endswith(("chat.googleapis.com", "hooks.slack.com", "webhook.office.com")):
        return {"text": message["text"]}
    return message


def _post(address: str, body: dict[str, Any]) -> str:
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


def _content(store: Storage, name: str) -> dict[str, Any]:
    if store.stat(name) is None:
        return {}
    try:
        return unseal(store.read(name))
    except ValueError:
        return {}
