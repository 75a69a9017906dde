"""Published pipelines: `vlmpipe publish`, and starting a run or a schedule from a published pipeline.

The registry stores each compiled pipeline under its name, in versions that never change, with tags that move: `latest`,
`v<version of vlmpipe>`, `content-<fingerprint>` and those of the user. The fingerprint shows that a file is there
already: publishing it a second time uploads nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.platforms.compiled import CONTENT_TAG, Compiled, Template, described
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.platforms.vertex.artifact_registry import DIGEST, HOST, Registry
from vlmpipe.trainer import __version__
from vlmpipe.trainer.config.job import without_gone
from vlmpipe.trainer.errors import ConfigError, os_errors

NAME = r"[a-z0-9][a-z0-9-]{3,127}"
ADDRESS = re.compile(rf"(?P<host>{HOST})/(?P<name>{NAME})/(?P<version>[A-Za-z0-9._~:@-]+)")
TAG = re.compile(r"[A-Za-z0-9._~@-]{1,128}")
MAX_TAGS = 8
LATEST = "latest"


@dataclass(frozen=True)
class PublishedTemplate:
    """A pipeline in the registry after `publish`."""

    compiled: Compiled
    address: str  # of this very version
    tags: dict[str, str]  # each with its change: new, moved, or there
    uploaded: bool  # False: the same bytes were there already

    def as_json(self) -> dict[str, object]:
        return {
            "pipeline": str(self.compiled.path),
            "template": self.address,
            "uploaded": self.uploaded,
            "tags": self.tags,
        }

    def lines(self) -> list[str]:
        done = "published" if self.uploaded else "is there already, byte for byte"
        tags = ", ".join(tag if state == "there" else f"{tag} ({state})" for tag, state in self.tags.items())
        return [f"{self.compiled.name} {done}: {self.address}", f"  tags      {tags}"]


def publish(registry: Registry, compiled: Compiled, tags: Sequence[str]) -> PublishedTemplate:
    """Put a compiled pipeline into the registry, unless these very bytes are there, and let the tags name it.

    Raises UserError where the registry refuses. Repeating it completes the rest.
    """
    with os_errors(f"reading {compiled.path}"):
        content = compiled.path.read_bytes()
    fingerprint = compiled.fingerprint()
    name = compiled.name
    version = registry.version_of(name, fingerprint)
    uploaded = not version or registry.download(name, version) != content
    if uploaded:
        version = registry.upload(compiled.path, fingerprint)
    done = {fingerprint: "new" if uploaded else "there"}
    done |= {tag: registry.put_tag(name, tag, version) for tag in all_tags(tags)}
    return PublishedTemplate(compiled, f"{registry.host}/{name}/{version}", done, uploaded)


def all_tags(requested: Sequence[str]) -> list[str]:
    """The tags of a published pipeline but for its fingerprint; `latest`, which others follow, moves last."""
    for tag in requested:
        if not TAG.fullmatch(tag) or tag.startswith(CONTENT_TAG):
            raise ConfigError(
                f"--tag {tag!r} cannot be a tag",
                expected="1 to 128 letters, digits and . _ ~ @ -, not beginning with content-, which vlmpipe sets",
            )
    tags = list(dict.fromkeys([f"v{__version__.replace('+', '-')}", *requested, LATEST]))
    if len(tags) >= MAX_TAGS:
        raise ConfigError(
            f"{len(requested)} tags are too many", expected=f"at most {MAX_TAGS - 3} in addition to vlmpipe's own"
        )
    return tags


def fetch(address: str, folder: Path) -> Template:
    """Fetch the pipeline at https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG-OR-VERSION into `folder`.

    A tag is resolved here: jobs name the version, which does not move, and the service would look a tag up with its own
    agent's rights, or fail (googleapis/python-aiplatform issues 2181 and 2398).

    Raises ConfigError for an address of another form and for a pipeline that is not vlmpipe's.
    """
    match = ADDRESS.fullmatch(address)
    if not match:
        raise ConfigError(
            f"{address} is not the address of a published pipeline",
            expected="https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG, as vlmpipe publish prints it",
        )
    registry, name, version = Registry(match["host"]), match["name"], match["version"]
    if not version.startswith(DIGEST):
        version = registry.version_of(name, version) or version  # without such a tag, the download fails
    content = registry.download(name, version)
    spec, config = _read(content, address)
    path = folder / f"{config.name}.published.yaml"
    with os_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Template(f"{registry.host}/{name}/{version}", described(path, spec), config)


def _read(content: bytes, address: str) -> tuple[pipeline_spec_pb2.PipelineSpec, RunConfig]:
    """The pipeline, and the run file that is the default of its parameter run_file."""
    spec = pipeline_spec_pb2.PipelineSpec()
    try:
        (document,) = documents(content)
        json_format.ParseDict(document, spec)
        run_file = json.loads(spec.root.input_definitions.parameters["run_file"].default_value.string_value)
    except (yaml.YAMLError, json_format.ParseError, ValueError) as error:
        raise ConfigError(
            f"{address} is not a pipeline of vlmpipe",
            expected="one that vlmpipe publish has put there: it holds its run file",
        ) from error
    # One that an earlier version has published holds every field of its time.
    return spec, parse_run_config(without_gone(run_file) if isinstance(run_file, dict) else run_file, address)
