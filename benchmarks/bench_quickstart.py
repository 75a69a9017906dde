"""The quickstart from several random starts: what it answers, and how far that spreads, by `make bench-quickstart`.

A small model that trains for a minute ends elsewhere with another seed, and on a processor with other rounding errors:
its figures are ranges. The seeds are those of the model's weights and of the order of data; the data are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "configs/digits.yaml"
VLMPIPE = "from vlmpipe.cli.entry import console; console()"


@dataclass(frozen=True)
class Answers:
    """Shares of the questions that one trained model answers exactly."""

    seed: int
    questions: int
    right_image: float
    another_image: float
    no_image: float
    chance: float


SHARES: dict[str, Callable[[Answers], float]] = {
    "right image": lambda one: one.right_image,
    "another image": lambda one: one.another_image,
    "no image": lambda one: one.no_image,
    "chance": lambda one: one.chance,
}


def answers(seed: int, evaluated: Mapping[str, Any]) -> Answers:
    """The figures of a run's evaluate.json."""
    controls = evaluated["controls"]
    return Answers(
        seed,
        evaluated["questions"],
        evaluated["exact_match"],
        controls["shuffled_image"]["exact_match"],
        controls["no_image"]["exact_match"],
        evaluated["chance"],
    )


def run(seed: int, root: Path, overrides: Sequence[str]) -> Answers:
    """Run the pipeline to its end. Its data are prepared once for all seeds under `root`."""
    before = set(root.glob("runs/*"))
    settings = [f"output.root_uri={root}", f"model.seed={seed}", f"train.seed={seed}", *overrides]
    done = subprocess.run([sys.executable, "-c", VLMPIPE, "run", CONFIG, *settings], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"seed {seed} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (folder,) = set(root.glob("runs/*")) - before
    return answers(seed, json.loads((folder / "evaluate.json").read_text()))


def table(found: Iterable[Answers]) -> list[str]:
    """A line for each seed, then the range and the standard deviation of each share."""
    rows = list(found)
    lines = ["| seed | questions | " + " | ".join(SHARES) + " |", "|---|--:|" + "--:|" * len(SHARES)]
    for one in rows:
        shares = " | ".join(f"{100 * share(one):.1f} %" for share in SHARES.values())
        lines.append(f"| {one.seed} | {one.questions:,} | {shares} |")
    columns = [[100 * share(one) for one in rows] for share in SHARES.values()]
    ranges = " | ".join(f"{min(column):.1f} to {max(column):.1f} %" for column in columns)
    lines.append(f"| range | | {ranges} |")
    if len(rows) > 1:
        deviations = " | ".join(f"{statistics.stdev(column):.1f}" for column in columns)
        lines.append(f"| standard deviation, points | | {deviations} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many random starts")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the run file")
    given = parser.parse_args(arguments)
    found = []
    with tempfile.TemporaryDirectory(prefix="vlmpipe-quickstart-") as root:
        for seed in range(given.seeds):
            found.append(run(seed, Path(root), given.overrides))
            print(f"seed {seed}: {100 * found[-1].right_image:.1f} % of {found[-1].questions:,} questions", flush=True)
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
