"""The console that tables are printed with: its own colours reach the terminal, control characters of texts do not."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vlmpipe.trainer.printable import printable


class TerminalConsole(Console):
    """A console on standard output. Texts come from anywhere; styles, and the cursor of a live table, are rich's."""

    def __init__(self, *, highlight: bool = True, width: int | None = None, record: bool = False) -> None:
        """record: print nothing, keep it for `export_html` and `export_text`."""
        file = io.StringIO() if record else _Styled(sys.stdout)
        # In a notebook rich would show each line by itself.
        super().__init__(file=file, highlight=highlight, width=width, record=record, force_jupyter=False)  # type: ignore[arg-type]

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
