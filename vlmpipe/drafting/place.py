"""The place of data that `vlmpipe init --data` is asked about: it is looked at on this machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmpipe.trainer.errors import ConfigError

ADDRESS = re.compile(r"([a-z0-9]+)://", re.IGNORECASE)
COPY = {"gs": "gcloud storage cp --recursive", "s3": "aws s3 cp --recursive"}


def on_this_machine(place: str) -> Path:
    """The path. Raises ConfigError for an address of elsewhere, with what brings a part of it here."""
    scheme = ADDRESS.match(place)
    if scheme is None:
        return Path(place)
    if scheme[1].lower() == "file":
        return Path(unquote(urlsplit(place).path))
    copy = COPY.get(scheme[1].lower())
    look = "look at it with --data sample, and set data.source to the address in the run file"
    raise ConfigError(
        f"--data is {place}, which is not on this machine",
        expected="a folder or a file of this machine",
        fix=f"copy a part of it here: {copy} {shlex.quote(place)} sample; {look}"
        if copy
        else f"copy a part of it here; {look}",
    )
