"""The documentation site: `make docs`. Strict: a dead link or anchor fails the build.

Sphinx with MyST: pages stay plain Markdown with relative links, a dead anchor fails, and the Python API comes from
docstrings. MkDocs checks links to pages alone, and needs plug-ins for docstrings.
"""

import re
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Measurements become pages too: Sphinx reads nothing outside of this folder, so they are copied (git ignores the copy).
shutil.rmtree(HERE / "results", ignore_errors=True)
shutil.copytree(HERE.parent / "benchmarks/results", HERE / "results", ignore=shutil.ignore_patterns("*.json"))

project = "vlmpipe"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "vlmpipe"
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = False  # types of libraries have no inventory here; links between pages are checked all the same
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]

# Navigation, added while building: the pages themselves stay plain Markdown.
CONTENTS = """

```{toctree}
:hidden:
:glob:
:caption: Tutorials
tutorial
tutorials/*
```
```{toctree}
:hidden:
:glob:
:caption: How-to guides
how-to/*
```
```{toctree}
:hidden:
:glob:
:caption: Reference
reference/*
```
```{toctree}
:hidden:
:caption: Decisions
decisions/README
```
```{toctree}
:hidden:
:glob:
:caption: Measurements
results/*
```
"""
DECISIONS = """

```{toctree}
:hidden:
:glob:
0*
```
"""


SECTIONS = {
    "": "Start",
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "decisions": "Decisions",
    "results": "Optional",
}


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph, without Markdown; empty where a page starts with none."""
    body = re.sub(r"```.*?```|<!--.*?-->", "", text.partition("\n")[2], flags=re.DOTALL)
    paragraphs = [part.strip() for part in body.split("\n\n") if part.strip()]
    if not paragraphs or paragraphs[0].startswith(("#", "|", "- ", "* ", "1. ")):
        return ""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|`", lambda match: match[1] or "", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=[.:?!]) (?=[A-Z])", plain)[0].rstrip(":")


def llms_txt(pages: dict[str, str], summary: str) -> str:
    """llms.txt: the pages, by section, each with a link to its Markdown on this site and its first sentence."""
    parts = [f"# {project}\n\n> {summary}\n"]
    for folder, heading in SECTIONS.items():
        names = sorted(name for name in pages if name.rpartition("/")[0] == folder)
        parts.append(f"\n## {heading}\n\n")
        for name in names:
            title = pages[name].partition("\n")[0].lstrip("# ")
            sentence = first_sentence(pages[name])
            parts.append(f"- [{title}](_sources/{name}.md.txt){f': {sentence}' if sentence else ''}\n")
    return "".join(parts)


def setup(app: Any) -> None:
    """Add the navigation to the two pages that list others, and lead links to measurements to their pages here."""

    def add_contents(_app: Any, page: str, source: list[str]) -> None:
        source[0] += {"index": CONTENTS, "decisions/README": DECISIONS}.get(page, "")
        source[0] = source[0].replace("(../../benchmarks/results/", "(../results/").replace("(../../docs/", "(../")

    def write_llms_txt(built: Any, problem: Exception | None) -> None:
        if problem is None:
            pages = {name: Path(built.env.doc2path(name)).read_text(encoding="utf-8") for name in built.env.found_docs}
            summary = first_sentence(pages["index"])
            Path(built.outdir, "llms.txt").write_text(llms_txt(pages, summary), encoding="utf-8")

    app.connect("source-read", add_contents)
    app.connect("build-finished", write_llms_txt)
