"""Documents of strangers cost bounded time and memory, and a page that costs too much is rejected alone."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from PIL import Image

from tests.support.fuzz import fuzzed
from vlmpipe.trainer.data import pdf_pages
from vlmpipe.trainer.data.pdf_pages import NoSuchPageError, PageError, PdfPages, rendered


def document(*objects: bytes) -> bytes:
    """A document of these objects after its catalog, its pages and one page, the objects 1 to 3."""
    first = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] /Contents 4 0 R /Resources "
        b"<< /XObject << /A 5 0 R >> >> >>",
    ]
    body, places = b"%PDF-1.7\n", []
    for number, content in enumerate([*first, *objects], 1):
        places.append(len(body))
        body += b"%d 0 obj %s endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(places) + 1
    return body + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (size, table, size, len(body))
    )


def stream(content: bytes, head: bytes = b"") -> bytes:
    return b"<< %s /Length %d >> stream\n%s\nendstream" % (head, len(content), content)


PLAIN = document(stream(b"1 0 0 rg 0 0 100 100 re f"), stream(b"", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9]"))


def nested(levels: int) -> bytes:
    """A page that draws a form that draws another 20 times, and so on."""
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 200 100] /Resources << /XObject << /A %d 0 R >> >>"
    forms = [stream(b"/A Do " * 20, form % number) for number in range(6, 5 + levels)]
    last = stream(b"0 0 200 100 re f " * 50, b"/Type /XObject /Subtype /Form /BBox [0 0 200 100]")
    return document(stream(b"/A Do"), *forms, last)


@pytest.fixture(scope="module")
def pages() -> Iterator[PdfPages]:
    made = PdfPages()
    code = "from vlmpipe.trainer.data import pdf_pages; pdf_pages.CPU_S = 1; pdf_pages.main()"
    made._process._command = [*made._process._command[:2], "-c", code]
    yield made
    made._process.end()


def test_the_process_renders_what_this_one_renders(pages: PdfPages) -> None:
    png = pages.png(PLAIN, "plain", 1)
    assert png == rendered(PLAIN, 1) and Image.open(io.BytesIO(png)).size == (400, 200)
    assert pages.png(b"", "plain", 1) == png, "the process has the document of the last page"
    with pytest.raises(NoSuchPageError, match="1 pages"):
        pages.png(PLAIN, "plain", 2)


def test_a_page_that_draws_for_too_long_is_refused_and_the_next_one_is_rendered(pages: PdfPages) -> None:
    with pytest.raises(PageError, match="takes more than a page may"):
        pages.png(nested(9), "nested", 1)
    assert pages.png(PLAIN, "plain", 1)


def test_the_document_is_sent_again_to_a_new_process(pages: PdfPages) -> None:
    pages.png(PLAIN, "plain", 1)
    pages._process.end()
    assert pages.png(PLAIN, "plain", 1)


@fuzzed(200, share=10)
@given(place=st.integers(0, len(PLAIN) - 1), byte=st.integers(1, 255), cut=st.booleans())
def test_every_damage_is_a_page_or_a_sentence(pages: PdfPages, place: int, byte: int, cut: bool) -> None:
    data = bytearray(PLAIN[:place] if cut else PLAIN)
    if not cut:
        data[place] ^= byte
    try:
        assert Image.open(io.BytesIO(pages.png(bytes(data), f"{place} {byte} {cut}", 1)))
        event("a page")
    except (PageError, NoSuchPageError) as error:
        assert str(error)
        event("refused in words")
    assert pdf_pages.CPU_S > 1
