"""Field types that several sections share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from trainer.secret_detection import form_of_secret, is_secret_name

Duration = Annotated[str, Field(pattern=r"^[0-9]{1,9}s$")]


_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def duration_s(text: str) -> int:
    """Seconds of a duration in the API's form, for example "3600s"."""
    return int(text.removesuffix("s"))


def checked_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _ENV_NAME.match(name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if is_secret_name(name) or form_of_secret(value):
            # The value is not repeated here: errors end up in logs.
            raise ValueError(
                f"{name} looks like a secret, and everybody who may see the job can read its environment; keep it in "
                "Secret Manager and let the code that needs it read it there"
            )
    return env
