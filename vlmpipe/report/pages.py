"""Common parts of the package's pages: style, macros (`parts.html.j2`) and formats of values."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jinja2

from vlmpipe.report.load import count, duration, percent

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


@functools.cache
def page_template(module: str, name: str) -> jinja2.Template:
    """The template of that name beside a module, which may import `parts.html.j2`. Text is escaped."""
    loaders = [jinja2.PackageLoader(entry, ".") for entry in (module, "vlmpipe.report.pages")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    as_text = functools.partial(json.dumps, ensure_ascii=False)  # plain text: autoescape comes after it
    environment.filters |= {"percent": percent, "count": count, "duration": duration, "tojson_text": as_text}
    return environment.get_template(name)
