"""The root of the repository, for tests wherever they lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
