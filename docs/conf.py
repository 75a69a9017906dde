"""The documentation site: `make docs`. Strict: a dead link or anchor fails the build."""

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
:caption: Tutorial
tutorial
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


def setup(app: Any) -> None:
    """Add the navigation to the two pages that list others, and lead links to measurements to their pages here."""

    def add_contents(_app: Any, page: str, source: list[str]) -> None:
        source[0] += {"index": CONTENTS, "decisions/README": DECISIONS}.get(page, "")
        source[0] = source[0].replace("(../../benchmarks/results/", "(../results/").replace("(../../docs/", "(../")

    app.connect("source-read", add_contents)
