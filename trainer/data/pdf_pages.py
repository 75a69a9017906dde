"""Pages of PDF documents as images. Run as a program, it renders what it is sent, within a budget.

A document is a stranger's program: a page may draw for hours or need any memory, and only a process can be ended.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from contextlib import closing

from vlmpipe.trainer.data.bounded_process import BoundedProcess, bound_memory, bound_time
from vlmpipe.trainer.data.sample import png_bytes

MODULE = "vlmpipe.trainer.data.pdf_pages"
CPU_S = 60  # of one page with its document's start; scanned pages of 50 million pixels take about 5
MEMORY_BYTES = 2 << 30  # beyond what the process has when it starts: a page's pixels three times, and the document
PDF_POINTS = 72  # an inch
PAGE_DPI = 144
MAX_PAGE_PIXELS = 50_000_000  # a page may claim any size


class PageError(Exception):
    """Fault of a page or its document."""


class NoSuchPageError(Exception):
    """The document has fewer pages."""


class PdfPages:
    """Renders pages in one process, which keeps the document of the last page. Safe to use from several threads."""

    def __init__(self) -> None:
        self._process = BoundedProcess(MODULE, "renders documents", cpu_s=CPU_S)
        self._lock = threading.Lock()
        self._held: tuple[int, str] = (0, "")  # the process, and the document that it has

    def png(self, document: bytes, key: str, page: int) -> bytes:
        """A page, from 1, as PNG. `key` identifies the document. Raises PageError, NoSuchPageError."""
        with self._lock:
            is_held = self._process.pid and self._held == (self._process.pid, key)
            sent = None if is_held else base64.b64encode(document).decode()
            answer = self._process.ask(json.dumps({"page": page, "document": sent}).encode())
            self._held = (self._process.pid, key)
        if answer is None:
            limits = f"{CPU_S} s of processor time and {MEMORY_BYTES >> 20} MiB of memory"
            raise PageError(f"takes more than a page may: {limits}")
        result = json.loads(answer)
        if "pages" in result:
            raise NoSuchPageError(f"{result['pages']} pages")
        if "problem" in result:
            raise PageError(result["problem"])
        return base64.b64decode(result["png"])


PAGES = PdfPages()


def rendered(data: bytes, page: int) -> bytes:
    """A page as PNG, in this process. Raises NoSuchPageError, and the library's errors."""
    import pypdfium2  # an extra

    with closing(pypdfium2.PdfDocument(data)) as document:
        document.init_forms()  # before a page is loaded, else fields are left out
        if page > len(document):
            raise NoSuchPageError(f"{len(document)} pages")
        opened = document[page - 1]
        width, height = (points * PAGE_DPI / PDF_POINTS for points in opened.get_size())
        shrunk = min(1.0, (MAX_PAGE_PIXELS / max(1.0, width * height)) ** 0.5)
        return png_bytes(opened.render(scale=shrunk * PAGE_DPI / PDF_POINTS).to_pil().convert("RGB"))


def main() -> None:
    """Answer each line of standard input, a page and its document or null for the last one, with a line."""
    import PIL.Image
    import PIL.PngImagePlugin  # noqa: F401, before memory is bounded
    import pypdfium2  # noqa: F401

    bound_memory(MEMORY_BYTES)
    print(flush=True)  # ready
    data = b""
    for line in sys.stdin:
        bound_time(CPU_S)
        answer: dict[str, object]
        try:
            asked = json.loads(line)
            data = base64.b64decode(asked["document"]) if asked["document"] is not None else data
            answer = {"png": base64.b64encode(rendered(data, asked["page"])).decode()}
        except NoSuchPageError as error:
            answer = {"pages": int(str(error).split()[0])}
        except MemoryError:
            answer = {"problem": "takes too much memory"}
        except Exception as error:  # decoders of damaged files raise what they like
            answer = {"problem": str(error)[:1000] or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
