"""Client for Cloud Run's API and for private services, by REST as for Vertex AI."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlmpipe.google_cloud.client import Place, Product, address_in, credentials_for, is_local, translate_errors
from vlmpipe.platforms.vertex.endpoint import Headers

if TYPE_CHECKING:
    from google.cloud.run_v2.services.services import ServicesClient

ENDPOINT_VARIABLE = "VLMPIPE_CLOUD_RUN_ENDPOINT"
API = "run.googleapis.com"
ROLE = "roles/run.developer"


def api_address(_location: str = "") -> str:
    """The API's address, one for all regions, or VLMPIPE_CLOUD_RUN_ENDPOINT. Raises as `address_in`."""
    return address_in(ENDPOINT_VARIABLE) or API


CLOUD_RUN = Product("Cloud Run", API, api_address)


def services_client() -> ServicesClient:
    """A client for services. A server on this machine (http://) gets no credentials."""
    from google.cloud.run_v2.services.services import ServicesClient

    address = api_address()
    return ServicesClient(
        credentials=credentials_for(address), transport="rest", client_options={"api_endpoint": address}
    )


def cloud_run_errors(place: Place) -> contextlib.AbstractContextManager[None]:
    """Re-raise the client's errors inside the block as UserErrors with a fix."""
    return translate_errors(place, role=ROLE, what="service", product=CLOUD_RUN)


def caller_headers(service_uri: str) -> Callable[[], dict[str, str]]:
    """A function that makes the headers of a question: an ID token for the service, renewed when it has run out.

    The audience is the address of the service also where one of its tags is asked (docs.cloud.google.com, Cloud Run,
    "Authenticating service-to-service"). ID tokens come from the metadata server or a service account's key.
    """
    if is_local(service_uri):
        return dict
    from google.auth.transport.requests import Request
    from google.oauth2 import id_token

    return Headers(id_token.fetch_id_token_credentials(service_uri, request=Request()))
