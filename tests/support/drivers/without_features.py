"""Import, check, plan and train the product without the rooms of any feature, then with the rooms of all but one.

without_features.py TREE DIGITS FEATURES: TREE/vlmpipe has no room and no line of a feature, TREE/rooms/NAME the rooms
of all features but NAME. DIGITS is the run file to check and plan. FEATURES is JSON: NAME -> [module, run.json].
Ends at the first failure, with a traceback and the name of the feature.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def import_below(package: ModuleType) -> int:
    """Import all modules of a package. Returns how many there are."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def in_fork(label: str, act: Callable[[], object]) -> None:
    """Run `act` in a fork of this process, and end the program where it fails."""
    pid = os.fork()
    if not pid:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"{label}: exit code {code}")


def plan(digits: str) -> None:
    import vlmpipe

    assert not [finding for finding in vlmpipe.check(digits) if finding.state == "failed"]
    assert vlmpipe.plan(digits).state != "red"


def train_without(rooms: Path, modules: dict[str, str], run: str) -> None:
    """Add the rooms and lines of the other features, import them, and train."""
    import vlmpipe.trainer.features
    from vlmpipe.trainer.distributed.process import run_worker
    from vlmpipe.trainer.hooks.table import FEATURES
    from vlmpipe.trainer.train import main

    vlmpipe.trainer.features.__path__.append(str(rooms))
    FEATURES.update(modules)
    import_below(vlmpipe.trainer.features)
    os.environ.update(RANK, MASTER_PORT="0")
    run_worker(partial(main, ["--config", run]))


def main() -> None:
    tree, digits, features = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    import vlmpipe
    from vlmpipe.trainer.hooks.table import FEATURES

    assert Path(vlmpipe.__file__).is_relative_to(tree) and not FEATURES
    print(import_below(vlmpipe), "modules", flush=True)
    in_fork("plan without features", partial(plan, digits))
    for name, (_, run) in features.items():
        others = {other: module for other, (module, _) in features.items() if other != name}
        in_fork(f"without {name}", partial(train_without, tree / "rooms" / name, others, run))


if __name__ == "__main__":
    main()
