"""Check whether the run's images are in their registry, for machines with amd64 processors, and keep their library
path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vlmpipe.access.needs import Named, named
from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.trainer.nesting import object_at

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NEEDED = "amd64"
READ = "artifact-registry-manifests"
SERVED, LIBRARIES = "deploy.image_uri", "LD_LIBRARY_PATH"
REGISTRY = re.compile(r"(?P<host>(?P<location>[a-z0-9-]+)-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/(?P<name>[^@:]+)")
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")


def image_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for each image: one request for its manifest, and one for its settings where the manifest lists none.

    Two more for the image of an endpoint, whose environment is compared with what its container gets.
    """
    fields: dict[str, list[Named]] = {}
    for resource in named(config):
        if resource.kind == "image":
            fields.setdefault(resource.resource, []).append(resource)
    for image, of_image in fields.items():
        field = ", ".join(resource.field for resource in of_image)
        served = any(resource.row == SERVED for resource in of_image) and config.deploy is not None
        libraries = config.deploy.environment.get(LIBRARIES, "") if served and config.deploy else ""
        try:
            yield _row(field, image, api, libraries)
        except CannotSee as error:
            yield unseen("image", f"{field}: {image}: {error.why}", error.fix)


def _row(field: str, image: str, api: GoogleApi, libraries: str) -> Row:
    """libraries: LD_LIBRARY_PATH of the image's container, where the run file or its default sets one."""
    parts = REGISTRY.match(image)
    if not parts:
        return unseen("image", f"{field}: {image} is in no registry of Google's")
    host, name = parts["host"], parts["name"]
    rest = image[parts.end() :]
    reference = rest.removeprefix("@") if rest.startswith("@") else rest.removeprefix(":").partition("@")[0] or "latest"
    accept = {"Accept": ", ".join((*INDEXES, *MANIFESTS))}
    answer = api.ask("GET", "images", f"/v2/{name}/manifests/{reference}", host=host, headers=accept)
    if answer.status == 404:
        build = "build and push it: make build builder=gcloud config=CONFIG"
        location, project, repository = _repository(parts)
        if answer.reason == "NAME_UNKNOWN" and repository:
            fix = f"{remedies.create_repository(location, project, repository)}\nthen {build}"
            return missing("image", f"{field}: there is no {image} and no repository for it", fix)
        return missing("image", f"{field}: there is no {image}", build)
    if answer.status != 200:
        return unseen("image", f"{field}: {image}: {answer.status} {answer.message}".strip(), _let_read(parts, api))
    result = _architectures(api, host, name, answer.content)
    if not result:
        return unseen("image", f"{field}: {image} is there; its manifest names no architecture").showing(READ, False)
    if NEEDED in result:
        lost = _lost_folders(_settings(api, host, name, answer.content), libraries) if libraries else ()
        if lost:
            text = f"{field}: {image} finds libraries in {', '.join(lost)}, which deploy.env.{LIBRARIES} leaves out"
            fix = f"set deploy.env.{LIBRARIES}: {':'.join((libraries, *lost))}"
            return missing("image", text, fix).showing(READ, True)
        return ok("image", f"{field}: {image} is there, for {NEEDED}").showing(READ, True)
    text = f"{field}: {image} is for {', '.join(sorted(result))}, and Vertex AI's machines are {NEEDED}"
    fix = "build it for them: make build config=CONFIG does, on machines of any kind"
    return missing("image", text, fix).showing(READ, True)


def _forms(manifest: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The image's forms for different platforms, where a manifest lists several."""
    listed = manifest.get("manifests")
    return [form for form in listed if isinstance(form, Mapping)] if isinstance(listed, list) else []


def _architectures(api: GoogleApi, host: str, name: str, manifest: Mapping[str, object]) -> set[str]:
    """The architectures for which the image has Linux files."""
    if "manifests" in manifest:
        platforms = [object_at(form, "platform") for form in _forms(manifest)]
        architectures = [_text_at(platform, "architecture") for platform in platforms if platform.get("os") == "linux"]
    else:
        architectures = [_text_at(_settings(api, host, name, manifest), "architecture")]
    return set(filter(None, architectures))


def _text_at(content: Mapping[str, object], key: str) -> str:
    """The text under a key; empty for anything else."""
    value = content.get(key)
    return value if isinstance(value, str) else ""


def _settings(api: GoogleApi, host: str, name: str, manifest: Mapping[str, object]) -> dict[str, object]:
    """The settings of an image's amd64 form; empty where its manifest names none."""
    for form in _forms(manifest):
        if object_at(form, "platform").get("architecture") == NEEDED and (of_form := _text_at(form, "digest")):
            path = f"/v2/{name}/manifests/{of_form}"
            accept = {"Accept": ", ".join(MANIFESTS)}
            manifest = api.ask("GET", "images", path, host=host, headers=accept).content
            break
    digest = _text_at(object_at(manifest, "config"), "digest")
    return api.ask("GET", "images", f"/v2/{name}/blobs/{digest}", host=host).content if digest else {}


def _lost_folders(settings: Mapping[str, object], libraries: str) -> tuple[str, ...]:
    """Folders of the image's own LD_LIBRARY_PATH that are not in the container's, which takes its place."""
    listed = object_at(settings, "config").get("Env")
    variables = dict(str(variable).partition("=")[::2] for variable in listed) if isinstance(listed, list) else {}
    image_folders = libraries.split(":")
    return tuple(folder for folder in variables.get(LIBRARIES, "").split(":") if folder and folder not in image_folders)


def _let_read(parts: re.Match[str], api: GoogleApi) -> str:
    location, project, repository = _repository(parts)
    return remedies.grant_on_repository(location, project, repository, api.member) if repository else ""


def _repository(parts: re.Match[str]) -> tuple[str, str, str]:
    """Location, project and name of an image's repository; empty for hosts that have none."""
    project, _, rest = parts["name"].partition("/")
    repository = rest.partition("/")[0]
    return (parts["location"], project, repository) if parts["location"] and repository else ("", "", "")
