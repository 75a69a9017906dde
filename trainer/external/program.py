"""The files of a training program, by which proofs and comparisons of runs know that it has changed."""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig


def program_digest(program: ExternalTrainerConfig | None) -> str:
    """sha256 (hex) of a program's files; empty for this package's own trainer, and where none of them is here.

    They are the files that the command names, the Python files next to them, or in this folder with `-m`, all modules
    of packages there that any of these imports, and the Python files of the program's package. Installed packages, and
    modules that are imported by a name that is computed, are not among them.
    """
    if program is None:
        return ""
    named = [path for path in map(Path, program.command) if path.is_file()]
    modules = [name for option, name in itertools.pairwise(program.command) if option == "-m"]
    files = set(named) | {file for uri in program.package_uris for file in Path(uri).rglob("*.py")}
    folders = {path.parent for path in named} | ({Path()} if modules else set())
    for folder in folders:
        files |= _imported(folder, [*named, *folder.glob("*.py")], modules)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest() if files else ""


def _imported(folder: Path, start: Iterable[Path], modules: Iterable[str]) -> set[Path]:
    """Files that are started from, and those of packages in the folder that they import, directly or not."""
    files, seen = set[Path](), set[str]()
    waiting, names = list(start), {name.partition(".")[0] for name in modules}
    while waiting or names - seen:
        for path in waiting:
            if path.suffix == ".py":
                names |= set(_imports(path))
        files |= set(waiting)
        new, seen = names - seen, seen | names
        waiting = [file for name in sorted(new) for file in (folder / name).rglob("*.py") if file not in files]
    return files


def _imports(path: Path) -> Iterator[str]:
    """First parts of the modules' names that a file imports; none of one that Python cannot read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
