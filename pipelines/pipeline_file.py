"""Reading compiled pipelines, which are YAML of some 90 kB."""

from __future__ import annotations

from typing import Any

import yaml

# libyaml's parser, where PyYAML has it: ten times as fast. Both are the safe subset.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(data: bytes) -> list[Any]:
    """All documents of a compiled file: a good one has one. Raises yaml.YAMLError."""
    return list(yaml.load_all(data, Loader=_LOADER))
