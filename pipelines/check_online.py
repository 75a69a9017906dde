"""`vlmpipe check --online`: looks up models, gs:// addresses and the region."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud import storage
from google.cloud.aiplatform.constants.base import SUPPORTED_REGIONS
from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url
from requests.exceptions import RequestException

from pipelines.check import EXAMPLE_PROJECT, Finding
from trainer.config.model import ModelConfig
from trainer.errors import ExitCode, UserError
from vlmpipe.backends.vertex.client import no_credentials, reason_of
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import did_you_mean

TIMEOUT_S = 5.0  # of each lookup


def check_online(config: RunConfig) -> list[Finding]:
    """One finding for each hub model, gs:// address and region; a lookup without an answer fails with code 69."""
    return [*_hub(config.model), *_storage(config), *_region(config)]


def _hub(model: ModelConfig) -> Iterator[Finding]:
    names = ("pretrained",) if model.pretrained else ("tower", "language_model")
    parts = [(f"model.{name}", getattr(model, name)) for name in names]
    wanted = [(field, part.weights, part.revision, "config.json") for field, part in parts if part.weights]
    if not model.tokenizer.startswith("train:"):
        wanted.append(("model.tokenizer", model.tokenizer, "", "tokenizer_config.json"))
    for field, name, revision, file in wanted:
        if not (name.startswith((".", "/", "~")) or Path(name).expanduser().is_dir()):
            yield _hub_file(field, name, revision, file)


def _hub_file(field: str, name: str, revision: str, file: str) -> Finding:
    """Ask for a file's header with the user's token. This shows that it may be downloaded, and costs one request."""
    at = f" at revision {revision}" if revision else ""

    def failed(text: str, fix: str, code: ExitCode = ExitCode.NOT_FOUND) -> Finding:
        return Finding("hub", "failed", f"{field}: {text}; {fix}", code)

    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision or None), timeout=TIMEOUT_S)
    except errors.OfflineModeIsEnabled:
        return Finding("hub", "unchecked", f"{field}: HF_HUB_OFFLINE is set, so {name} is not looked up")
    except errors.HFValidationError:
        return failed(f"{name} is no hub id", "give a folder, or an id such as Qwen/Qwen2.5-0.5B", ExitCode.CONFIG)
    except errors.GatedRepoError:
        fix = f"accept its terms at {constants.ENDPOINT}/{name} and log in with hf auth login"
        return failed(f"{name} is gated, and your account has no access", fix, ExitCode.NO_PERMISSION)
    except errors.RevisionNotFoundError:
        return failed(f"{name} has no revision {revision}", f"choose one of {constants.ENDPOINT}/{name}/commits/main")
    except errors.EntryNotFoundError:
        return failed(f"{name}{at} has no {file}", "give a model in transformers' format")
    except errors.RepositoryNotFoundError:
        fix = "correct the id, or for a private model set HF_TOKEN or log in with hf auth login"
        return failed(f"the hub has no model {name} that your token may read", fix)
    except Exception as error:  # the client's HTTP library differs between versions, and so do its network errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            fix = "renew the token with hf auth login, or correct HF_TOKEN"
            return failed(f"the hub refuses your token for {name} (HTTP {status})", fix, ExitCode.NO_PERMISSION)
        why = f"HTTP {status}" if status else f"no answer within {TIMEOUT_S:g} s ({type(error).__name__})"
        fix = "try again, or check the network and HF_ENDPOINT"
        return failed(f"{name} cannot be looked up at {constants.ENDPOINT}: {why}", fix, ExitCode.UNAVAILABLE)
    return Finding("hub", "ok", f"{field}: {name}{at} may be read")


def _storage(config: RunConfig) -> Iterator[Finding]:
    root = config.root_uri("vertex")
    data = {"data.source": config.data.source, "data.image_folder": config.data.image_folder}
    wanted = [(field, uri, True) for field, uri in data.items() if uri.startswith("gs://")]
    if root.startswith("gs://"):
        field = "output.root_uri" if root == config.output.root_uri else "gcp.pipeline_root"
        if config.gcp.project == EXAMPLE_PROJECT:
            yield Finding("storage", "unchecked", f"{field}: {root} belongs to the example project {EXAMPLE_PROJECT}")
        else:
            wanted.append((field, root, False))  # the run makes its folder itself
    if not wanted:
        return
    try:
        client = storage.Client(project=config.gcp.project or "none")
    except GoogleAuthError as error:
        yield Finding("storage", "failed", no_credentials(error).text(), ExitCode.NO_LOGIN)
        return
    for field, uri, has_objects in wanted:
        try:
            yield _address(client, field, uri, has_objects)
        except UserError as error:
            yield Finding("storage", "failed", f"{field}: {error.text()}", int(error.code))


def _address(client: storage.Client, field: str, uri: str, has_objects: bool) -> Finding:
    """List one object below `uri`. This shows that the bucket exists and may be read."""
    bucket, _, path = uri.removeprefix("gs://").partition("/")
    prefix = re.split(r"[*?\[{]", path)[0] if has_objects else ""

    def failed(text: str, code: ExitCode) -> Finding:
        return Finding("storage", "failed", f"{field}: {text}", code)

    try:
        found = list(client.list_blobs(bucket, prefix=prefix, max_results=1, timeout=TIMEOUT_S, retry=None))
    except exceptions.NotFound:
        return failed(f"there is no bucket {bucket}; correct {uri}, or create the bucket", ExitCode.NOT_FOUND)
    except (exceptions.Forbidden, exceptions.Unauthorized):
        fix = "ask for roles/storage.objectViewer on it, or log in with another account"
        return failed(f"your account may not list objects of gs://{bucket}; {fix}", ExitCode.NO_PERMISSION)
    except (RequestException, TransportError) as error:
        text = f"no answer from Cloud Storage for {uri} within {TIMEOUT_S:g} s ({reason_of(error)}); try again"
        return failed(text, ExitCode.UNAVAILABLE)
    except GoogleAuthError as error:
        raise no_credentials(error) from error
    except exceptions.GoogleAPICallError as error:
        return failed(f"Cloud Storage answers {error.code} for {uri}; try again", ExitCode.UNAVAILABLE)
    if has_objects and not found:
        return failed(f"nothing is stored under gs://{bucket}/{prefix}; correct {uri}", ExitCode.NOT_FOUND)
    return Finding("storage", "ok", f"{field}: {uri} {'exists' if has_objects else 'is in a bucket that exists'}")


def _region(config: RunConfig) -> Iterator[Finding]:
    location = config.gcp.location
    if not config.gcp.project:
        return
    if location in SUPPORTED_REGIONS:
        yield Finding("region", "ok", f"gcp.location: {location} is a region of Vertex AI")
    else:
        hint = did_you_mean(location, sorted(SUPPORTED_REGIONS)) or f"; expected one of {', '.join(SUPPORTED_REGIONS)}"
        yield Finding("region", "failed", f"gcp.location: {location} is no region of Vertex AI{hint}", ExitCode.CONFIG)
