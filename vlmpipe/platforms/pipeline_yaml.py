"""Reads and writes compiled pipelines as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

# libyaml's parser and emitter, where PyYAML has them: ten times as fast. All are of the safe subset.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def documents(data: bytes) -> list[object]:
    """All documents of a compiled file: a good one has one. Raises yaml.YAMLError."""
    return list(yaml.load_all(data, Loader=_LOADER))


def dump_documents(contents: Sequence[Mapping[str, object]]) -> str:
    """The text of a file with these documents, the same for the same contents."""
    text: str = yaml.dump_all(contents, Dumper=_DUMPER, sort_keys=True)
    return text
