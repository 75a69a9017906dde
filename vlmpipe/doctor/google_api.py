"""Requests to Google's REST APIs with this machine's credentials, or as another account by impersonation.

No request takes longer than TIMEOUT_S, and a service that once gave no answer is not asked again.
"""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vlmpipe.doctor import remedies
from vlmpipe.google_cloud.client import SCOPE, no_credentials, reason_of

if TYPE_CHECKING:
    import requests
    from google.auth.credentials import Credentials
    from google.auth.transport import requests as transport

TIMEOUT_S = 5.0  # of each request
TOKEN_LIFETIME_S = 300
LONGEST_MESSAGE_CHARS = 300
# Addresses by service; of images the registry's own host.
ADDRESSES = {
    "serviceusage": "https://serviceusage.googleapis.com",
    "monitoring": "https://monitoring.googleapis.com",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com",
    "iam": "https://iam.googleapis.com",
    "iamcredentials": "https://iamcredentials.googleapis.com",
    "storage": "https://storage.googleapis.com",
    "secretmanager": "https://secretmanager.googleapis.com",
    "bigquery": "https://bigquery.googleapis.com",
    "compute": "https://compute.googleapis.com",
    "images": "https://{host}",
}


class CannotSee(Exception):
    """A question without an answer: why, and the command that would let it be seen."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


@dataclass(frozen=True)
class Answer:
    """Answer of a service: 200 with its content, or a status below 500 with its message and the reason's name."""

    status: int
    content: dict[str, Any]
    message: str = ""
    reason: str = ""


@dataclass
class Silence:
    """Services that gave no answer, each with the reason; shared by all questions."""

    reasons: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class GoogleApi:
    """Google's services as one account. `email` is empty for a person's own credentials, whose name is not known."""

    project: str
    email: str
    credentials: Credentials
    silence: Silence

    @classmethod
    def own(cls, project: str) -> Self:
        """Use this machine's credentials. Raises UserError (67) if there are none, CannotSee without an answer."""
        import google.auth
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            credentials, _ = google.auth.default(scopes=[SCOPE])
            credentials.refresh(_token_request())
        except TransportError as error:
            raise CannotSee(f"Google gives no token: {reason_of(error)}") from error
        except GoogleAuthError as error:
            raise no_credentials(error) from error
        email = getattr(credentials, "service_account_email", "") or ""
        return cls(project, email if "@" in email else "", credentials, Silence())

    @property
    def member(self) -> str:
        """This account as IAM names it."""
        return remedies.member(self.email) if self.email else "user:YOUR_ACCOUNT"

    def as_account(self, email: str) -> GoogleApi:
        """The services as another account. Raises CannotSee where this one may not take its tokens."""
        from google.auth import impersonated_credentials
        from google.auth.exceptions import RefreshError, TransportError

        if email == self.email:
            return self
        address = f"{ADDRESSES['iamcredentials']}/v1/projects/-/serviceAccounts/{email}:generateAccessToken"
        credentials = impersonated_credentials.Credentials(
            source_credentials=self.credentials,
            target_principal=email,
            target_scopes=[SCOPE],
            lifetime=TOKEN_LIFETIME_S,
            iam_endpoint_override=address,
        )
        try:
            credentials.refresh(_token_request())
        except TransportError as error:
            raise CannotSee(f"IAM gives no token of {email}: {reason_of(error)}") from error
        except RefreshError as error:
            fix = remedies.grant_on_account(email, self.member, "roles/iam.serviceAccountTokenCreator")
            raise CannotSee(f"{self.email or 'your account'} may not take tokens of {email}", fix) from error
        return GoogleApi(self.project, email, credentials, self.silence)

    def get(self, service: str, path: str, **parameters: object) -> Answer:
        """The answer to a GET. Raises CannotSee for none, and for one that says nothing about the question."""
        return self.ask("GET", service, path, params=parameters)

    def granted(self, service: str, path: str, permissions: tuple[str, ...]) -> Answer:
        """The answer of a method testIamPermissions to a POST. Raises CannotSee as `get`."""
        return self.ask("POST", service, f"{path}:testIamPermissions", json={"permissions": list(permissions)})

    def ask(self, method: str, service: str, path: str, *, host: str = "", **settings: object) -> Answer:
        """One request, of at most TIMEOUT_S. Raises CannotSee."""
        import requests
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession

        asked = host or service
        if why := self.silence.reasons.get(asked):
            raise CannotSee(why)
        address = ADDRESSES[service].format(host=host) + path
        try:
            with AuthorizedSession(self.credentials, auth_request=_token_request()) as session:
                response = session.request(method, address, timeout=TIMEOUT_S, **settings)
        except (requests.RequestException, GoogleAuthError) as error:
            why = f"no answer from {asked} within {TIMEOUT_S:g} s ({reason_of(error)})"
            with self.silence.lock:
                self.silence.reasons[asked] = why
            raise CannotSee(why) from error
        return self._read(asked, response)

    def _read(self, service: str, response: requests.Response) -> Answer:
        content = _object(response)
        reason, text = _error_of(content)
        message = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)[:LONGEST_MESSAGE_CHARS]
        charged = self.credentials.quota_project_id or self.project
        if reason == "SERVICE_DISABLED" and "quota project" in text:
            raise CannotSee("your login names no project that requests count against", remedies.charge(self.project))
        if reason == "SERVICE_DISABLED":
            where = "" if charged == self.project else f" in {charged}, which your login counts requests against"
            fix = remedies.enable(charged, f"{service}.googleapis.com")
            raise CannotSee(f"the API {service}.googleapis.com is not enabled{where}", fix)
        if reason == "USER_PROJECT_DENIED":
            role = "roles/serviceusage.serviceUsageConsumer"
            fix = remedies.grant_on_project(charged, self.member, role)
            raise CannotSee(f"your account may not let its requests count against {charged}", fix)
        if response.status_code in (401, 429) or response.status_code >= 500:
            raise CannotSee(f"{service} answers {response.status_code} {message}".strip())
        return Answer(response.status_code, content, message, reason)


def _error_of(content: dict[str, object]) -> tuple[str, str]:
    """Reason and message of an error: Google's form, or that of the OCI distribution specification."""
    error = content.get("error")
    if isinstance(error, dict):
        reasons = (
            str(detail["reason"])
            for detail in error.get("details", ())
            if isinstance(detail, dict) and "reason" in detail
        )
        return next(reasons, ""), str(error.get("message", ""))
    errors = content.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return str(first.get("code", "")), str(first.get("message", ""))


def _object(response: requests.Response) -> dict[str, object]:
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _token_request() -> transport.Request:
    """Transport that fetches a token: as all requests within TIMEOUT_S, and without google-auth's own retries."""
    import requests
    from google.auth.transport.requests import Request

    return functools.partial(Request(requests.Session()), timeout=TIMEOUT_S)
