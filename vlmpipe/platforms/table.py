"""The platforms, each by its name for --target: a new one is a folder and a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.base import Platform


class Line(NamedTuple):
    """A platform: its class, which is imported when it is asked, and the commands that start something there."""

    where: str
    submits: bool = True  # vlmpipe submit
    searches: bool = False  # vlmpipe tune


# In the order of menus; the first is the default. Runs are looked for from the last on: to Vertex AI, the id of a job
# in --project may have any form.
PLATFORMS: dict[str, Line] = {
    "vertex": Line("vlmpipe.platforms.vertex.platform:Vertex", searches=True),
    "kubeflow": Line("vlmpipe.platforms.kubeflow.platform:Kubeflow"),
    "local": Line("vlmpipe.platforms.local.platform:Local", submits=False, searches=True),
}
DEFAULT = next(iter(PLATFORMS))


def platform_of(name: str) -> Platform:
    """The platform called `name`. Raises ConfigError for another name."""
    if name not in PLATFORMS:
        raise ConfigError(f"target {name!r}", expected=f"one of {', '.join(PLATFORMS)}")
    module, _, title = PLATFORMS[name].where.partition(":")
    made: Platform = getattr(importlib.import_module(module), title)()
    return made


def services() -> list[str]:
    """Names of the platforms that `vlmpipe submit` starts runs on."""
    return [name for name, line in PLATFORMS.items() if line.submits]


def searching() -> list[str]:
    """Names of the platforms that `vlmpipe tune` runs trials on, this machine first."""
    return [name for name, line in reversed(PLATFORMS.items()) if line.searches]


def here() -> Platform:
    """The platform whose runs are processes of this machine. Raises ConfigError without one."""
    for name in reversed(PLATFORMS):
        platform = platform_of(name)
        if platform.is_here:
            return platform
    raise ConfigError("no platform runs on this machine", expected="one in vlmpipe/platforms/table.py")


def fits_priced_machines(config: RunConfig) -> bool:
    """Return whether a platform with priced machines takes the run file, which otherwise names no machine to buy."""
    priced = (platform for platform in map(platform_of, PLATFORMS) if platform.has_prices)
    return any(not list(platform.missing(config)) for platform in priced)


def in_order_of_search() -> Iterator[Platform]:
    """The platforms in the order in which they are asked for a run: this machine first."""
    result = [platform_of(name) for name in reversed(PLATFORMS)]
    return iter(sorted(result, key=lambda platform: not platform.is_here))
