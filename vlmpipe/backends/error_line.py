"""Finds the error message in a replica's output, line by line."""

from __future__ import annotations

from trainer.errors import UNEXPECTED_PREFIX


class ErrorLines:
    """Reads one stream of lines."""

    def __init__(self) -> None:
        self._inside = False

    def read(self, text: str, last: str) -> str:
        """The last error after the next line, `text` without its end; `last` is the one before it.

        An error is its sentence, then what was expected and what to do.
        """
        if text.startswith("error: "):
            self._inside = True
            return text.removeprefix("error: ")
        if self._inside and text.startswith("  "):
            return f"{last}\n{text}"
        self._inside = False
        return last or text if text.startswith(UNEXPECTED_PREFIX) else last
