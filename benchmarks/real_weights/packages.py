"""Files of packages that hold weights."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path


def package_file(name: str, sha256: str) -> Path:
    """A file by its path in a package, which is not imported. Raises ValueError where its content is another."""
    package, _, inside = name.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"the package of {name} is not installed; `make real-weights` installs it")
    path = Path(spec.origin).parent / inside
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {sha256}")
    return path
