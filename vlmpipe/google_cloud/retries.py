"""Requests to Google's services: sent again after passing faults, with a timeout for each.

Inside `answering_soon`, no request takes longer than SOON_S, nor is one sent again after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.api_core import exceptions
from google.api_core.retry import Retry
from google.auth.exceptions import TransportError
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import ConnectTimeout, ProxyError, RequestException, SSLError, Timeout
from urllib3.exceptions import NewConnectionError

from vlmpipe.trainer.storage.outage import SOON_S, must_answer_soon

Answer = TypeVar("Answer")
REQUEST_TIMEOUT_S = 30.0
PASSING = (
    exceptions.BadGateway,
    exceptions.GatewayTimeout,
    exceptions.InternalServerError,
    exceptions.ServiceUnavailable,
    NoConnection,
    Timeout,
)
RETRY = Retry(initial=0.5, maximum=8.0, timeout=45.0)
PATIENT = Retry(initial=1.0, maximum=30.0, timeout=900.0)  # of who watches a job that costs money, for days


def send_request(
    method: Callable[..., Answer], *arguments: object, faults: list[Exception] | None = None, **named: object
) -> Answer:
    """Call a method of Google's client until it works; see `retrying`."""
    return retrying(lambda: send_once(method, *arguments, **named), faults)


def send_patiently(method: Callable[..., Answer], **named: object) -> Answer:
    """Call a method of Google's client that may be called twice until it works, also where names are not resolved or
    nothing is reached for a while. Raises the last fault when PATIENT is over."""

    def passing(error: Exception) -> bool:
        return isinstance(error, (*PASSING, RequestException, TransportError))

    try:
        return PATIENT.with_predicate(passing)(send_once)(method, **named)
    except exceptions.RetryError as error:
        raise error.cause or error from error


def list_all(method: Callable[..., Iterable[Answer]], *arguments: object, **named: object) -> list[Answer]:
    """Everything that a listing method of Google's client returns, on all pages."""
    return retrying(lambda: list(send_once(method, *arguments, **named)))


def send_once(method: Callable[..., Answer], *arguments: object, **named: object) -> Answer:
    """Call a method of Google's client, which would otherwise retry by rules of its own."""
    return method(*arguments, retry=None, timeout=request_timeout_s(), **named)


def request_timeout_s() -> float:
    """How long a request may take: SOON_S inside `answering_soon`."""
    return SOON_S if must_answer_soon() else REQUEST_TIMEOUT_S


def retrying(call: Callable[[], Answer], faults: list[Exception] | None = None) -> Answer:
    """Call a function until it works, fails for good, or time is up; then raise the last fault. `faults` gets them all.

    A first request without any connection is not repeated: a user who is offline wants to know at once.
    """
    met = [] if faults is None else faults

    def passing(error: Exception) -> bool:
        met.append(error)
        return isinstance(error, PASSING) and not all(_never_arrived(fault) for fault in met)

    patience = RETRY.with_timeout(min(SOON_S, RETRY.timeout)) if must_answer_soon() else RETRY
    try:
        return patience.with_predicate(passing)(call)()
    except exceptions.RetryError as error:
        raise error.cause or error from error


def may_have_arrived(faults: list[Exception]) -> bool:
    """Return whether a request may have been carried out although its answer never came."""
    return any(isinstance(fault, PASSING) and not _never_arrived(fault) for fault in faults)


def _never_arrived(fault: Exception) -> bool:
    """Return whether the request certainly did not reach the service."""
    if isinstance(fault, ConnectTimeout | ProxyError | SSLError):
        return True
    wrapped = fault.args[0] if fault.args else None
    return isinstance(getattr(wrapped, "reason", None), NewConnectionError)
