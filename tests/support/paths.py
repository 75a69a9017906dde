"""The root of the repository and its files, for tests wherever they lie."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files_of_repository(*patterns: str) -> list[Path]:
    """Return the files that match a pattern of git, without ignored ones: `make docs` leaves pages under docs/."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]
