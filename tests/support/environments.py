"""Virtual environments that hold what pip would install for a requirement, linked from this one: no network."""

from __future__ import annotations

import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def linked_environment(folder: Path, wheel: Distribution, extras: str) -> Path:
    """An environment with `wheel` and everything that it requires with these extras (comma-separated), nothing else.

    Returns its Python. Raises PackageNotFoundError where this environment lacks one of the packages.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for found in [wheel, *requirements(wheel, frozenset(filter(None, extras.split(","))))]:
        link(found, site_packages)
    return folder / "bin/python"


def requirements(root: Distribution, extras: frozenset[str]) -> Iterator[Distribution]:
    """All that a distribution requires, directly or not, each once."""
    todo, seen = [(root, extras)], {(root.name, extras)}
    yielded: set[str] = set()
    while todo:
        parent, asked = todo.pop()
        for text in parent.requires or []:
            requirement = Requirement(text)
            needed = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in {"", *asked}
            )
            key = (requirement.name, frozenset(requirement.extras))
            if not needed or key in seen:
                continue
            seen.add(key)
            found = distribution(requirement.name)
            todo.append((found, key[1]))
            if found.name not in yielded:
                yielded.add(found.name)
                yield found


def link(found: Distribution, site_packages: Path) -> None:
    """Its modules and metadata; programs in bin/ stay where they are."""
    for file in found.files or []:
        if ".." in file.parts:
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(file.locate())
