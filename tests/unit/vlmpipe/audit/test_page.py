"""Text of the data does nothing on the page of an audit: it is shown as it is, without control characters."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.data.prepared import conversation, job_config, png, run_prepare, write_json
from vlmpipe.audit.page import build_page
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.printable import unsafe_characters

HOSTILE = (
    "</p><script>a()</script>",
    "\" onerror='a()' x=\"<img>",
    "\x1b[31mred\x07\x00\x85",
    "abc\u202egnp.exe\u2066\u2028",
    "{{ 7 * 7 }}&lt;b&gt;",
)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.handlers: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.handlers |= {name for name, _ in attrs if name.startswith("on")}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each hostile text is id, question and answer of two samples of one image, which contradict each other."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "images").mkdir()
    lines = []
    for number, text in enumerate(HOSTILE):
        (folder / "images" / f"{number}.png").write_bytes(png(number))
        for answer in (text, f"no {number}"):
            talk = conversation(f"<image>\n{text}?", answer)
            known = f"id {number}" if unsafe_characters(text) else text  # preparation refuses such an id
            name = f"{known}-{answer[:2]}" if answer != text else known
            lines.append({"id": name, "image": f"{number}.png", "conversations": talk, "split": "train"})
    for number in range(10, 13):
        (folder / "images" / f"{number}.png").write_bytes(png(number))
        talk = conversation("<image>\nWhat?", "It.")
        lines.append({"id": f"v{number}", "image": f"{number}.png", "conversations": talk, "split": "eval"})
    job = _job(folder, lines)
    uri = run_prepare(job).uri
    found, catalogue = audit(AuditRequest(job, uri, has_run=False))
    assert found.finding("contradiction").groups == len(HOSTILE)
    return build_page(f"run {HOSTILE[0]}{HOSTILE[3]}", found, catalogue.stored)


def _job(folder: Path, lines: list[dict[str, object]]) -> JobConfig:
    source = write_json(folder / "a.json", lines)
    return job_config(folder / "root", source=str(source), image_folder=str(folder / "images"), max_split_error=1.0)


def test_no_text_of_the_data_makes_an_element_or_a_handler(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    assert not tags.found & {"script", "iframe", "object", "link", "base", "form"} and not tags.handlers
    assert all(tags.text.count(text) >= 2 for text in (HOSTILE[0], HOSTILE[1], HOSTILE[4]))


def test_no_control_character_and_no_mark_of_direction_reaches_the_page(page: str) -> None:
    assert not [char for char in page if (ord(char) < 32 and char not in "\n\t") or 0x7F <= ord(char) <= 0x9F]
    assert not set(page) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2028")
    assert "gnp.exe" in page
