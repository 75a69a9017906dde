"""Files that an imported command or file names: opened where they lie next to it or in the working directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmpipe.config.yaml_loader import read_text
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.printable import unsafe_characters

MAX_FILES = 20  # of one import; a file may name others
MAX_WORDS = 5_000  # of a file of arguments


class NotOpenedError(Exception):
    """A named file that is not read; the text says why."""


@dataclass
class NamedFiles:
    """Reads named files below `folders`, each once. Without folders, as for Python's callers, none is opened."""

    folders: tuple[Path, ...] = ()
    num_opened: int = 0

    def text(self, name: str) -> str:
        """The text of a file. Raises NotOpenedError for one that is missing, outside of the folders, or no text."""
        if not name or unsafe_characters(name) or len(name) > 1000 or "://" in name:
            raise NotOpenedError("it is no file here")
        if Path(name).is_absolute():
            raise NotOpenedError(f"{name} is an absolute path: vlmpipe import takes the file itself")
        for folder in self.folders:
            path = folder / name
            try:
                if not path.is_file():
                    continue
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise NotOpenedError(f"{name} leads out of its folder: vlmpipe import takes the file itself")
                self.num_opened += 1
                if self.num_opened > MAX_FILES:
                    raise NotOpenedError(f"more than {MAX_FILES} files are named")
                return read_text(path, "a text file")
            except (OSError, ValueError) as error:
                raise NotOpenedError(f"{name} cannot be read: {error}") from None
            except ConfigError as error:
                raise NotOpenedError(error.found) from None
        raise NotOpenedError(f"{name} is not here: next to the imported file, vlmpipe import reads it too")


def with_argument_files(words: list[str], files: NamedFiles) -> tuple[list[str], dict[str, str]]:
    """Words with those of @FILE in its place, and what became of each such file: its words, or why it is not read."""
    expanded: list[str] = []
    notes: dict[str, str] = {}
    for word in words:
        name = word[1:]
        if not word.startswith("@") or not name or name.startswith("@") or "=" in name:
            expanded.append(word)
            continue
        try:
            lines = files.text(name).splitlines()
        except NotOpenedError as error:
            notes[word] = str(error)
            expanded.append(word)
            continue
        inner = [part for line in lines if not line.lstrip().startswith("#") for part in line.split()]
        if len(inner) > MAX_WORDS or any(part.startswith("@") for part in inner):
            notes[word] = f"{name} has more than {MAX_WORDS:,} words, or names files itself"
            expanded.append(word)
        else:
            notes[word] = ""
            expanded += inner
    return expanded, notes
