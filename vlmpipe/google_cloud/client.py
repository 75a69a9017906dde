"""Client for Vertex AI: endpoint, credentials, and translation of its errors and of Cloud Run's.

Everything is REST: the tests run the code that talks to Google, requests pass through HTTPS proxies, and an error is a
status and a text.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError
    from google.api_core.operations_v1 import AbstractOperationsClient
    from google.auth.credentials import Credentials
    from google.cloud.aiplatform_v1.services.endpoint_service import EndpointServiceClient
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    from google.cloud.aiplatform_v1.services.model_service import ModelServiceClient
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient
    from google.cloud.aiplatform_v1.services.schedule_service import ScheduleServiceClient
    from google.cloud.aiplatform_v1beta1.services.endpoint_service import (
        EndpointServiceClient as BetaEndpointServiceClient,
    )

    from vlmpipe.config.run_config import RunConfig

Client = TypeVar("Client")

ENDPOINT_VARIABLE = "VLMPIPE_VERTEX_ENDPOINT"
LOGIN = "gcloud auth application-default login"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOCAL_HOSTS = ("127.0.0.1", "localhost")
LONGEST_MESSAGE_CHARS = 1000


@dataclass(frozen=True)
class Place:
    """Where on Vertex AI a run goes, and as whom its steps run; empty where nothing is started."""

    project: str
    location: str
    service_account: str = ""

    @classmethod
    def of(cls, config: RunConfig) -> Place:
        gcp = config.gcp
        return cls(gcp.project, gcp.location, gcp.service_account)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.location}"

    def console_url(self, job_id: str, *, in_pipelines: bool) -> str:
        """The page of a run of a pipeline, or else of a custom or tuning job, in the Google Cloud console.

        As the SDK's `_dashboard_uri`: of 2026's new console, pages of jobs are under agent-platform, of pipelines not.
        """
        page = "vertex-ai" if in_pipelines else "agent-platform"
        of = "pipelines/runs" if in_pipelines else "training"
        where = f"{page}/locations/{self.location}/{of}/{job_id}?project={self.project}"
        return f"https://console.cloud.google.com/{where}"


@dataclass(frozen=True)
class Product:
    """A service of Google Cloud whose errors are translated. address: of its API, by the place's location."""

    title: str
    api: str
    address: Callable[[str], str]


def endpoint(location: str) -> str:
    """The API's address: the region's own, or VLMPIPE_VERTEX_ENDPOINT. Raises as `address_in`."""
    return address_in(ENDPOINT_VARIABLE) or f"{location}-aiplatform.googleapis.com"


VERTEX_AI = Product("Vertex AI", "aiplatform.googleapis.com", endpoint)


def address_in(variable: str) -> str:
    """The address of an API in a variable of the environment; empty where it is not set.

    Raises ConfigError for an http:// address of another machine: the access token would be sent in the clear.
    """
    address = os.environ.get(variable, "").rstrip("/")
    if not address:
        return ""
    if not re.fullmatch(r"(https?://)?[A-Za-z0-9.-]+(:[0-9]+)?", address):
        raise ConfigError(
            f"{variable} is {address!r}",
            expected="a host such as us-central1-aiplatform.example.com, or http://localhost:PORT for a test server",
        )
    if address.startswith("http://") and not is_local(address):
        raise ConfigError(
            f"{variable} is {address}, without encryption",
            expected="https://, or http:// on 127.0.0.1 or localhost, where no credentials are sent",
        )
    return address


def pipeline_client(location: str) -> PipelineServiceClient:
    """A client for pipeline jobs. A server on this machine (http://) gets no credentials.

    Raises UserError when there are no usable credentials: nothing has been sent then.
    """
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient

    return _client(PipelineServiceClient, location)


def schedule_client(location: str) -> ScheduleServiceClient:
    """A client for schedules, as `pipeline_client`."""
    from google.cloud.aiplatform_v1.services.schedule_service import ScheduleServiceClient

    return _client(ScheduleServiceClient, location)


def model_client(location: str) -> ModelServiceClient:
    """A client for the model registry, as `pipeline_client`."""
    from google.cloud.aiplatform_v1.services.model_service import ModelServiceClient

    return _client(ModelServiceClient, location)


def endpoint_client(location: str) -> EndpointServiceClient:
    """A client for endpoints of deployed models, as `pipeline_client`."""
    from google.cloud.aiplatform_v1.services.endpoint_service import EndpointServiceClient

    return _client(EndpointServiceClient, location)


def beta_endpoint_client(location: str) -> BetaEndpointServiceClient:
    """A client for fields of endpoints that only v1beta1 has, as `pipeline_client`."""
    from google.cloud.aiplatform_v1beta1.services.endpoint_service import EndpointServiceClient

    return _client(EndpointServiceClient, location)


def job_client(location: str) -> JobServiceClient:
    """A client for custom and tuning jobs, as `pipeline_client`."""
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

    return _client(JobServiceClient, location)


def _client(kind: Callable[..., Client], location: str) -> Client:
    address = endpoint(location)
    return kind(credentials=credentials_for(address), transport="rest", client_options={"api_endpoint": address})


def operations_client(location: str) -> AbstractOperationsClient:
    """A client that polls long-running operations.

    The generated clients poll at /ui/, which is not documented; this one polls at /v1/.
    """
    from google.api_core.operations_v1 import AbstractOperationsClient, OperationsRestTransport

    address = endpoint(location)
    transport = OperationsRestTransport(host=address, credentials=credentials_for(address), scopes=[SCOPE])
    return AbstractOperationsClient(transport=transport)


@contextlib.contextmanager
def translate_errors(
    place: Place,
    *,
    role: str = "roles/aiplatform.user",
    what: str = "pipeline job",
    product: Product = VERTEX_AI,
) -> Iterator[None]:
    """Re-raise the client library's errors inside the block as UserErrors with a fix.

    `role` is the one that the block needs on the project, `what` the kind of resource that it requests of `product`.
    """
    import requests
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError, TransportError

    try:
        yield
    except GoogleAPICallError as error:
        raise _api_error(error, place, role, what, product) from error
    except (requests.exceptions.RequestException, TransportError) as error:
        raise _unreachable(product, place, reason_of(error)) from error
    except GoogleAuthError as error:
        raise no_credentials(error) from error


def is_local(address: str) -> bool:
    """Return whether the address is that of a test server on this machine, which gets no credentials."""
    return address.startswith("http://") and urlsplit(address).hostname in LOCAL_HOSTS


def credentials_for(address: str) -> Credentials:
    """Return this machine's default credentials, anonymous ones for a server on it. Raises UserError without any."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError

    if is_local(address):
        return AnonymousCredentials()
    try:
        result, _ = google.auth.default(scopes=[SCOPE])
    except DefaultCredentialsError as error:
        raise no_credentials(error) from error
    return result


def no_credentials(error: Exception) -> UserError:
    """The error for missing or expired credentials."""
    return UserError(
        f"no usable Google Cloud credentials: {_first_sentence(error)}",
        expected="application default credentials",
        fix=f"{LOGIN}\nor point GOOGLE_APPLICATION_CREDENTIALS at a service account's key file",
        code=ExitCode.NO_LOGIN,
    )


def _unreachable(product: Product, place: Place, why: str) -> UserError:
    return UserError(
        f"{product.title} does not answer at {product.address(place.location)}: {why}",
        expected="a network that reaches it, and a gcp.location that exists",
        fix="check network, proxy (HTTPS_PROXY) and gcp.location, then try again",
        code=ExitCode.UNAVAILABLE,
    )


def _api_error(error: GoogleAPICallError, place: Place, role: str, what: str, product: Product) -> UserError:
    message = " ".join(error.message.split())[:LONGEST_MESSAGE_CHARS]
    status = int(error.code or 0)
    if status == 403 and error.reason == "SERVICE_DISABLED":
        return UserError(
            f"the {product.title} API is not enabled in project {place.project}: {message}",
            fix=f"gcloud services enable {product.api} --project {place.project}",
            code=ExitCode.UNAVAILABLE,
        )
    if status == 403:
        return UserError(
            f"no permission in project {place.project}, or there is no such project: {message}",
            expected=_roles(place, role),
            fix=f"gcloud projects add-iam-policy-binding {place.project} --member=user:YOUR_ACCOUNT --role={role}\n"
            f"or correct the project, or log in with another account: {LOGIN}",
            code=ExitCode.NO_PERMISSION,
        )
    if status == 401:
        return no_credentials(error)
    if status == 404:
        return ConfigError(
            f"not found on {product.title}: {message}",
            expected=f"project {place.project} with {what}s in {place.location}",
            fix="correct gcp.project and gcp.location",
        )
    if status == 409:
        return UserError(
            f"another {what} of this name exists already: {message}",
            fix="submit again: a new name is drawn",
            code=ExitCode.UNAVAILABLE,
        )
    if status == 429:
        return UserError(
            f"a quota of project {place.project} is used up: {message}",
            fix="wait for other runs to end, or ask for more under IAM & Admin > Quotas in the console",
            code=ExitCode.UNAVAILABLE,
        )
    if 400 <= status < 500:
        return ConfigError(
            f"{product.title} refuses the {what}: {message}",
            expected="values that the API accepts",
            fix="correct the field in the run file",
        )
    return _unreachable(product, place, f"{status} {message}")


def _roles(place: Place, role: str) -> str:
    if not place.service_account:
        return f"{role} on the project, for this account"
    return (
        f"{role} on the project and roles/iam.serviceAccountUser on {place.service_account}, for the account that "
        "submits"
    )


def reason_of(error: Exception) -> str:
    """The innermost cause of a failed connection, without the addresses of objects that wrap it."""
    inner: BaseException = error
    while (deeper := getattr(inner, "reason", None) or next(iter(inner.args), None)) is not None:
        if not isinstance(deeper, BaseException):
            break
        inner = deeper
    return _first_sentence(inner) or type(inner).__name__


def _first_sentence(error: BaseException) -> str:
    sentence = str(error.args[0] if error.args and isinstance(error.args[0], str) else error)
    sentence = re.sub(
        r"<[^<>]*object at 0x[0-9a-f]+>: |HTTPS?Connection(?:Pool)?\([^)]*\): ", "", " ".join(sentence.split())
    )
    return re.split(r"(?<=\w)\. ", sentence)[0].rstrip(".")[:LONGEST_MESSAGE_CHARS]
