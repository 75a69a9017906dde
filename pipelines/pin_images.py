"""Writes the digests of pushed images into a run file, at the end of `make build`.

    docker image inspect ... | python -m vlmpipe.pipelines.pin_images --registry host/project/repository --tag t \
        --torch-build cu130 [--config run.yaml]

A tag may move while a run is queued; a digest cannot.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from vlmpipe.config.yaml_loader import compose, parse_yaml, read_run_file
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors, run_main

IMAGES = {"trainer": ("cluster", "image_uri"), "pipeline": ("gcp", "pipeline_image")}
FIELDS = {**IMAGES, "torch_build": ("cluster", "torch_build")}
FILE = Path("build/images.json")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def main(arguments: list[str] | None = None) -> int:
    """Read the builder's answer on stdin; print and write the images by digest."""
    parser = argparse.ArgumentParser(prog="vlmpipe.pipelines.pin_images", description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--torch-build", required=True, help="in the trainer image")
    parser.add_argument("--config", type=Path, help="run file to write them into")
    options = parser.parse_args(arguments)
    images = by_digest(json.load(sys.stdin), options.registry, options.tag)
    values = {**images, "torch_build": options.torch_build}
    fields = {".".join(FIELDS[name]): value for name, value in values.items()}
    with os_errors("writing the images' names"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps({"tag": options.tag, **fields}, indent=1) + "\n", encoding="utf-8")
    for field, value in fields.items():
        print(f"{field}={value}")
    if options.config:
        read_run_file(options.config)  # reports errors of the file
        with os_errors(f"writing the images into {options.config}"):
            pinned = pin(options.config.read_bytes().decode(), values, str(options.config))
            options.config.write_bytes(pinned.encode())
        print(f"written to {FILE} and {options.config}")
    else:
        print(f"written to {FILE}; make build config=FILE puts them into a run file")
    return ExitCode.OK


def by_digest(answer: Any, registry: str, tag: str) -> dict[str, str]:
    """Each image as `registry/name@sha256:…`, from what `docker image inspect` or `gcloud builds describe` print.

    Raises UserError (69) when the builder knows of no pushed image of that name and tag.
    """
    digests_by_name = {}
    for name in IMAGES:
        requested = f"{registry}/{name}"
        digests = (
            _of_docker(answer, requested, tag) if isinstance(answer, list) else _of_cloud_build(answer, requested, tag)
        )
        if len(digests) != 1 or not _DIGEST.fullmatch(min(digests)):
            raise UserError(
                f"the builder names {len(digests)} digests of {requested}:{tag}",
                expected="one, sha256: and 64 hexadecimal digits: a builder knows it once the image is pushed",
                fix="look at what the builder printed above; then make build again",
                code=ExitCode.UNAVAILABLE,
            )
        digests_by_name[name] = f"{requested}@{digests.pop()}"
    return digests_by_name


def _of_docker(images: list[dict[str, Any]], repository: str, tag: str) -> set[str]:
    """The digest that the registry gave: an image that lies in several has several."""
    return {
        digest
        for image in images
        if f"{repository}:{tag}" in (image.get("RepoTags") or [])
        for place, _, digest in (text.partition("@") for text in image.get("RepoDigests") or [])
        if place == repository
    }


def _of_cloud_build(build: dict[str, Any], repository: str, tag: str) -> set[str]:
    """cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#results"""
    images = build.get("results", {}).get("images", [])
    return {image.get("digest", "") for image in images if image.get("name") == f"{repository}:{tag}"}


def pin(text: str, values: dict[str, str], source: str) -> str:
    """A run file's text with these values of `FIELDS`. All else stays as it is, comments and layout too.

    A missing section is added at the end. Raises ConfigError when one is written in a way that cannot be changed.
    """
    requested = copy.deepcopy(parse_yaml(text, source))
    for name, value in values.items():
        section, field = FIELDS[name]
        text = _with_field(text, section, field, value, source)
        requested.setdefault(section, {})[field] = value
    if parse_yaml(text, source) != requested:
        raise _not_ours_to_write(source, *FIELDS["trainer"], values["trainer"])
    return text


def _with_field(text: str, section: str, field: str, value: str, source: str) -> str:
    run_file = compose(text)
    if not isinstance(run_file, yaml.MappingNode) or run_file.flow_style:
        raise _not_ours_to_write(source, section, field, value)
    fields = _value(run_file, section)
    if fields is None:
        return f"{text.rstrip()}\n\n{section}:\n  {field}: {value}\n"
    if not isinstance(fields, yaml.MappingNode) or not fields.value:
        raise _not_ours_to_write(source, section, field, value)
    node = _value(fields, field)
    if node is None and fields.flow_style:
        start = end = fields.value[0][0].start_mark.index
        value = f"{field}: {value}, "
    elif node is None:
        start = end = fields.start_mark.index
        value = f"{field}: {value}\n{' ' * fields.start_mark.column}"
    else:
        start, end = node.start_mark.index, node.end_mark.index
        value = value if start < end else f" {value}"  # after a colon with nothing after it
    return text[:start] + value + text[end:]


def _value(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in mapping.value if name.value == key), None)


def _not_ours_to_write(source: str, section: str, field: str, value: str) -> ConfigError:
    return ConfigError(
        f"{source} has a section {section!r} that cannot be written into: nothing was changed",
        fix=f"write it by hand, {section}:\n  {field}: {value}",
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
