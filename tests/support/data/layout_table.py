"""Layouts of data sets that people have: what preparation makes of each, or why it is refused."""

from __future__ import annotations

from tests.support.data.column_layouts import COLUMN_LAYOUTS
from tests.support.data.json_layouts import JSON_LAYOUTS
from tests.support.data.layouts import Layout
from tests.support.data.learned_layouts import LEARNED_LAYOUTS

LAYOUTS: dict[str, Layout] = {**JSON_LAYOUTS, **LEARNED_LAYOUTS, **COLUMN_LAYOUTS}
