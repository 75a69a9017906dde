"""The console that tables are printed with: its own colours reach the terminal, control characters of texts do not."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment

from vlmpipe.trainer.printable import COLUMNS, printable


class TerminalConsole(Console):
    """A console on standard output, at most COLUMNS wide. Styles, and the cursor of a live table, are rich's."""

    def __init__(self, *, highlight: bool = True, record: bool = False) -> None:
        """record: print nothing, keep it for `export_html` and `export_text`."""
        file = io.StringIO() if record else _Styled(sys.stdout)
        width = None if sys.stdout.isatty() and not record else COLUMNS
        # In a notebook rich would show each line by itself.
        super().__init__(file=file, highlight=highlight, width=width, record=record, force_jupyter=False)  # type: ignore[arg-type]

    @property
    def size(self) -> ConsoleDimensions:
        """The terminal's size now, of which a live table uses at most COLUMNS."""
        terminal = super().size
        return ConsoleDimensions(min(terminal.width, COLUMNS), terminal.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of any printed object, nested ones too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Styled:
    """A stream whose writes have control sequences that are meant (`vlmpipe.trainer.redaction`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(getattr(self._stream, "write_styled", self._stream.write)(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
