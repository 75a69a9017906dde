"""Scores of shipped run files from several random starts, and how far they spread, by `make bench-starts`.

A small model that trains for a minute ends elsewhere with another seed, and on a processor with other rounding errors:
its scores are ranges. The seeds are those of the model's weights and of the order of data; the data are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.environment import environment
from benchmarks.support.suite import INTERRUPTED, stopped_by_signals

VLMPIPE = "from vlmpipe.cli.entry import console; console()"
SEEDS = 5


@dataclass(frozen=True)
class Share:
    """Where a run's folder has the share of questions or pairs, or the loss, that a column shows."""

    column: str
    keys: tuple[str, ...]  # into evaluate.json
    stage: str = ""  # one before the last
    is_share: bool = True  # else a number of its own unit, which the column names

    def text(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.2f}"

    def range_text(self, values: Sequence[float]) -> str:
        if self.is_share:
            return f"{100 * min(values):.1f} to {100 * max(values):.1f} %"
        return f"{min(values):.2f} to {max(values):.2f}"

    def deviation_text(self, values: Sequence[float]) -> str:
        deviation = statistics.stdev(values)
        return f"{100 * deviation:.1f}" if self.is_share else f"{deviation:.3f}"

    def read(self, run: Path) -> float:
        value: Any = evaluated(run / "stages" / self.stage if self.stage else run)
        for key in self.keys:
            value = value[key]
        return float(value)


# By run file in configs/, what README and the guides state.
RUN_FILES: dict[str, tuple[Share, ...]] = {
    "digits": (
        Share("right image", ("exact_match",)),
        Share("another image", ("controls", "shuffled_image", "exact_match")),
        Share("no image", ("controls", "no_image", "exact_match")),
        Share("chance", ("chance",)),
    ),
    "digits-preferences": (
        Share("right answer likelier, before", ("reference_preference_accuracy",)),
        Share("right answer likelier", ("preference_accuracy",)),
        Share("right answer gained more", ("reward_accuracy",)),
        Share("answered exactly, before", ("exact_match",), stage="answer"),
        Share("answered exactly", ("exact_match",)),
    ),
    "arr-coc": (
        Share("base, all tokens", ("exact_match",), stage="base"),
        Share("4 tokens", ("exact_match",)),
        Share("all tokens", ("controls", "all_tokens", "exact_match")),
        Share("4 evenly spaced tokens", ("controls", "uniform_tokens", "exact_match")),
    ),
    "openmoji": (
        Share("loss of a token, nats", ("loss",), is_share=False),
        Share("answered exactly", ("exact_match",)),
        Share("likeness to the expected name (ANLS)", ("anls",)),
    ),
}


@dataclass(frozen=True)
class Scores:
    """Of one trained model, in the order of the run file's shares."""

    seed: int
    questions: int
    shares: tuple[float, ...]


def evaluated(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "evaluate.json").read_text(encoding="utf-8")))


def scores(run_file: str, seed: int, run: Path) -> Scores:
    """The scores in a finished run's folder."""
    return Scores(seed, evaluated(run)["questions"], tuple(share.read(run) for share in RUN_FILES[run_file]))


def train(run_file: str, seed: int, root: Path, overrides: Sequence[str]) -> Scores:
    """Run the pipeline to its end, or stop it where this process is stopped. Its data are prepared once for all seeds
    under `root`.
    """
    before = set(root.glob("runs/*"))
    settings = [f"output.root_uri={root}", f"model.seed={seed}", f"train.seed={seed}", *overrides]
    command = [sys.executable, "-c", VLMPIPE, "run", f"configs/{run_file}.yaml", *settings]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C does not reach it: it is stopped once, below
    ) as running:
        try:
            printed, _ = running.communicate()
        except KeyboardInterrupt:
            running.terminate()
            running.communicate()
            raise
    if running.returncode:
        raise SystemExit(f"seed {seed} ended with {running.returncode}:\n{printed[-6000:]}")
    (folder,) = set(root.glob("runs/*")) - before
    return scores(run_file, seed, folder)


def row(run_file: str, found: Scores) -> str:
    columns = zip(RUN_FILES[run_file], found.shares, strict=True)
    shares = " | ".join(column.text(value) for column, value in columns)
    return f"| {found.seed} | {found.questions:,} | {shares} |"


def table(run_file: str, found: Sequence[Scores]) -> list[str]:
    """A line for each seed, then the range and the standard deviation of each share."""
    columns = RUN_FILES[run_file]
    head = " | ".join(share.column for share in columns)
    lines = [f"| seed | questions | {head} |", "|---|--:|" + "--:|" * len(columns)]
    lines += [row(run_file, one) for one in found]
    of_column = list(zip(columns, zip(*(one.shares for one in found), strict=True), strict=True))
    lines.append(f"| range | | {' | '.join(share.range_text(values) for share, values in of_column)} |")
    if len(found) > 1:
        deviations = " | ".join(share.deviation_text(values) for share, values in of_column)
        unit = "points" if all(share.is_share for share in columns) else "points; of a loss nats"
        lines.append(f"| standard deviation, {unit} | | {deviations} |")
    return lines


def page(run_file: str, found: Sequence[Scores], about: Mapping[str, Any]) -> Iterator[str]:
    """The results with where they come from, as benchmarks/results has them."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    yield f"# {about['title']}\n"
    yield f"{about['date']}. `{about['command']}`. {about['machine']}, {about['shared']}. Versions: {versions}.\n"
    yield f"Each row is `vlmpipe run configs/{run_file}.yaml model.seed=N train.seed=N`: shares of the"
    yield "validation questions or pairs, or a loss on them. Nothing here is a time, and other work on the machine"
    yield "changes no figure.\n"
    yield from table(run_file, found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", nargs="?", choices=RUN_FILES, default="digits", help="one of configs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the run file")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many random starts")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results to this file too")
    given = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    found: list[Scores] = []
    with stopped_by_signals():
        try:
            with tempfile.TemporaryDirectory(prefix="vlmpipe-starts-") as root:
                for seed in range(given.seeds):
                    found.append(train(given.run_file, seed, Path(root), given.overrides))
                    print(row(given.run_file, found[-1]), flush=True)
        except KeyboardInterrupt:  # the starts that ended are worth having
            print(f"stopped in start {len(found) + 1} of {given.seeds}", file=sys.stderr)
        if found:
            short = "" if len(found) == given.seeds else f", stopped before {given.seeds}"
            about = environment(f"{given.run_file} from {len(found)} random starts{short}", load)
            text = "\n".join(page(given.run_file, found, about)) + "\n"
            print(text, end="")
            if given.markdown:
                given.markdown.write_text(text, encoding="utf-8")
    return 0 if len(found) == given.seeds else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
