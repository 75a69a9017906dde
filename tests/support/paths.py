"""Paths of the repository, wherever in tests/ a module lies."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
