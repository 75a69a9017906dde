"""`vlmpipe check --online`: looks up models, addresses in buckets and the region."""

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

from vlmpipe.backends.vertex.client import no_credentials, reason_of
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.pipelines.check import EXAMPLE_PROJECT, Finding, of_stages
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.hub_errors import hub_error
from vlmpipe.trainer.secret_manager import use_hub_token
from vlmpipe.trainer.storage.model_folders import bucket_address

TIMEOUT_S = 5.0  # of each lookup


def check_online(config: RunConfig) -> list[Finding]:
    """One finding for each hub model, address in a bucket and region; a lookup without an answer fails with code 69."""
    of_each = {name: [*_hub(run.model), *_storage(run), *_region(run)] for name, run in config.stage_runs().items()}
    return of_stages(of_each)


def _hub(model: ModelConfig) -> Iterator[Finding]:
    wanted = [
        (f"model.{name}", part.weights, part.revision, "config.json")
        for name, part in model.sources.items()
        if part and _is_on_hub(part.weights)
    ]
    if not model.tokenizer.startswith("train:") and _is_on_hub(model.tokenizer):
        wanted.append(("model.tokenizer", model.tokenizer, "", "tokenizer_config.json"))
    if wanted and model.hub_token_secret:
        yield _token(model.hub_token_secret)
    for each in wanted:
        yield _hub_file(*each)


def _is_on_hub(name: str) -> bool:
    is_place = name.startswith((".", "/", "~")) or bool(bucket_address(name)) or Path(name).expanduser().is_dir()
    return bool(name) and not is_place


def _token(secret: str) -> Finding:
    """Look up with the token that the jobs will have, where this account may read it."""
    try:
        use_hub_token(secret)
    except UserError as error:
        return Finding("hub", "unchecked", f"{error.found}; here the hub is asked with your own token")
    return Finding("hub", "ok", f"model.hub_token_secret: {secret} can be read")


def _hub_file(field: str, name: str, revision: str, file: str) -> Finding:
    """Ask for a file's header with the user's token. This shows that it may be downloaded, and costs one request."""
    at = f" at revision {revision}" if revision else ""
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision or None), timeout=TIMEOUT_S)
    except errors.OfflineModeIsEnabled:
        return Finding("hub", "unchecked", f"{field}: HF_HUB_OFFLINE is set, so {name} is not looked up")
    except errors.HFValidationError:
        text = f"{field}: {name} is no hub id; give a folder, or an id such as Qwen/Qwen2.5-0.5B"
        return Finding("hub", "failed", text, ExitCode.CONFIG)
    except Exception as error:  # the client's HTTP library differs between versions, and so do its network errors
        known = hub_error(error, name, revision, file)
        if known is None:
            why = f"no answer within {TIMEOUT_S:g} s ({type(error).__name__})"
            found = f"{name} cannot be looked up at {constants.ENDPOINT}: {why}"
            known = UserError(found, fix="try again, or check the network and HF_ENDPOINT", code=ExitCode.UNAVAILABLE)
        return Finding("hub", "failed", f"{field}: {known.found}; {known.fix}", int(known.code))
    return Finding("hub", "ok", f"{field}: {name}{at} may be read")


def _storage(config: RunConfig) -> Iterator[Finding]:
    root = config.root_uri("vertex")
    data = config.data.addresses()
    model = {f"model.{name}": part.weights for name, part in config.model.sources.items() if part}
    model["model.tokenizer"] = config.model.tokenizer
    data |= {field: f"{address}/" for field, name in model.items() if (address := bucket_address(name))}
    for field, uri in data.items():
        if uri.startswith("s3://"):
            yield _s3_address(field, uri)
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
    prefix = _before_pattern(path) if has_objects else ""

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


def _s3_address(field: str, uri: str) -> Finding:
    from vlmpipe.trainer.storage.s3 import holds_objects  # its library comes with an extra

    try:
        found = holds_objects(_before_pattern(uri))
    except UserError as error:
        return Finding("storage", "failed", f"{field}: {error.text()}", int(error.code))
    if not found:
        return Finding("storage", "failed", f"{field}: nothing is stored at {uri}; correct it", ExitCode.NOT_FOUND)
    return Finding("storage", "ok", f"{field}: {uri} exists")


def _before_pattern(path: str) -> str:
    """What comes before the first wildcard or brace."""
    return re.split(r"[*?\[{]", path)[0]


def _region(config: RunConfig) -> Iterator[Finding]:
    location = config.gcp.location
    if not config.gcp.project:
        return
    if location in SUPPORTED_REGIONS:
        yield Finding("region", "ok", f"gcp.location: {location} is a region of Vertex AI")
    else:
        hint = did_you_mean(location, sorted(SUPPORTED_REGIONS)) or f"; expected one of {', '.join(SUPPORTED_REGIONS)}"
        yield Finding("region", "failed", f"gcp.location: {location} is no region of Vertex AI{hint}", ExitCode.CONFIG)
