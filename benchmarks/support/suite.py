"""A benchmark of several parts: its command line, its budget of time, and what its parts measure with."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.support.processes import call
from benchmarks.support.progress import Progress, clock
from benchmarks.support.report import Report, UnfairError
from benchmarks.support.timing import Measured, RoundLimit, clocked, interleaved

if TYPE_CHECKING:
    from vlmpipe.trainer.distributed.process import ProcessContext

T = TypeVar("T")

BUDGET_MINUTES = 10.0
QUICK_ROUNDS = 2
INTERRUPTED = 130  # exit code, also of vlmpipe
AGAIN_S = 0.05  # until a dropped interrupt is raised again
FOLDER = Path("/var/tmp")  # on a disk, where /tmp may be memory


@dataclass(frozen=True)
class Part:
    """A part of a benchmark, which can be asked for by its name."""

    name: str  # of its function too, with _ for -
    module: str  # of this package; imported when the part runs
    seconds: float  # its share of a default run; of a part that only --only runs, what it takes
    summary: str
    default: bool = True

    def line(self) -> str:
        only = "" if self.default else ", only by --only"
        return f"  {self.name:<13} {clock(self.seconds):>5}  {self.summary}{only}"

    def load(self) -> Callable[[Bench], None]:
        """The function."""
        module = importlib.import_module(f"benchmarks.{self.module}")
        function: Callable[[Bench], None] = getattr(module, self.name.replace("-", "_"))
        return function


@dataclass(frozen=True)
class Suite:
    """A benchmark: `main` runs it."""

    title: str
    parts: Sequence[Part]
    rounds: int = 7  # of each comparison, at most
    device: Callable[[argparse.Namespace], str] | None = None  # its name; raises SystemExit where it is missing

    def main(self, description: str | None, arguments: Sequence[str] | None = None) -> int:
        """Run the parts that were asked for. Returns 1 when one failed, 130 after Ctrl-C; the others' figures stand."""
        chosen = self._parser(description).parse_args(arguments)
        if chosen.list:
            print(f"{self.title}, and how long each part takes in a default run ({BUDGET_MINUTES:g} minutes at most):")
            print("\n".join(part.line() for part in self.parts))
            return 0
        names = chosen.only or [part.name for part in self.parts if part.default]
        parts = [part for part in self.parts if part.name in names]
        rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else self.rounds)
        minutes = chosen.budget or (math.inf if chosen.rounds or chosen.quick else BUDGET_MINUTES)
        report = Report(self.title, {"rounds at most": rounds})
        if self.device:
            report.settings["device"] = self.device(chosen)
        if math.isfinite(minutes):
            report.settings["minutes at most"] = f"{minutes:g}"
        with stopped_by_signals():
            with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-", dir=chosen.folder) as scratch:
                bench = Bench(report, Path(scratch), Progress(len(parts)), rounds, quick=chosen.quick, size=chosen.size)
                try:
                    code = 1 if bench.run(parts, 60 * minutes) else 0
                except KeyboardInterrupt:  # what was found until then is worth having
                    names = [part.name for part in parts]
                    rest = names[names.index(bench.part) :] if bench.part else names
                    report.note(
                        f"Interrupted in {rest[0]}: what it was comparing, and the parts after it, are missing; "
                        f"--only {' '.join(rest)} measures them."
                    )
                    code = INTERRUPTED
            report.publish(as_json=chosen.json, as_markdown=chosen.markdown)
        return code

    def _parser(self, description: str | None) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="parts:\n" + "\n".join(part.line() for part in self.parts),
        )  # fmt: skip
        names = [part.name for part in self.parts]
        parser.add_argument("--list", action="store_true", help="the parts, what each measures and how long it takes")
        parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help="some of the parts")
        parser.add_argument(
            "--budget", type=_positive(float), metavar="MINUTES",
            help=f"time for all parts together; fewer rounds and cases where it is short (default {BUDGET_MINUTES:g})",
        )  # fmt: skip
        parser.add_argument(
            "--rounds", type=_positive(int), help=f"rounds of each comparison (default {self.rounds}); lifts the budget"
        )
        parser.add_argument("--quick", action="store_true", help="small sizes that show that it works; not for figures")
        parser.add_argument(
            "--size", type=_positive(int), default=0, help="largest size of a part that measures several (theirs)"
        )
        parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where data is written (default {FOLDER})")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
        parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
        return parser


class Bench:
    """What a part measures with: it takes rounds within the part's share of the time, and says what it is at."""

    def __init__(
        self, report: Report, scratch: Path, progress: Progress, rounds: int, *, quick: bool, size: int = 0
    ) -> None:
        """`size`: the largest one of a part that measures several; 0 for the part's own."""
        self.report, self.scratch, self.rounds, self.quick, self.size = report, scratch, rounds, quick, size
        self._progress = progress
        self._left, self._expected, self._deadline_s = 1, 1, math.inf  # comparisons, and the end of the part's time
        self.part = ""  # the one that runs
        self._cut: list[str] = []
        self._failed_cases = 0

    @cached_property
    def worker(self) -> ProcessContext:
        """This process, with a process group of its own."""
        from vlmpipe.trainer.distributed.process import start_worker

        return start_worker()

    def run(self, parts: Sequence[Part], seconds: float) -> list[str]:
        """Run these parts, each within its share of the time that is left. Returns the names of those that failed."""
        deadline_s, failed = time.monotonic() + seconds, []
        with contextlib.closing(self._progress):
            for number, part in enumerate(parts):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._cut.append(f"{part.name} was left out")
                    continue
                share_s = left_s * part.seconds / sum(each.seconds for each in parts[number:])
                self._deadline_s = time.monotonic() + share_s
                self._progress.begin(part.name, part.seconds, share_s)
                if not self._run(part):
                    failed.append(part.name)
        if self._cut:
            self.report.note("Time was short (--budget, --rounds): " + "; ".join(self._cut) + ".")
        return failed

    def _run(self, part: Part) -> bool:
        self.expect(1)
        self.part, self._failed_cases = part.name, 0
        rows = len(self.report.rows), len(self.report.predictions)
        try:
            part.load()(self)
        except Exception as error:  # what the other parts find is worth having
            if isinstance(error, UnfairError):
                del self.report.rows[rows[0] :], self.report.predictions[rows[1] :]
            if isinstance(error, subprocess.CalledProcessError) and error.output:
                print(error.output, file=sys.stderr)
            traceback.print_exc()
            self._progress.end(f"failed: {error}")
            self.report.note(f"{part.name} failed: {error}")
            return False
        if self._failed_cases:
            self._progress.end(f"failed in {self._failed_cases} cases")
            return False
        self._progress.end()
        return True

    @contextlib.contextmanager
    def going_on(self, case: str) -> Iterator[None]:
        """Go on after this case where it fails, and let the part fail at its end."""
        try:
            yield
        except Exception as error:  # what the other cases find is worth having
            traceback.print_exc()
            self._failed_cases += 1
            self.report.note(f"{self.part}, {case}: failed: {error}")

    def expect(self, comparisons: int) -> None:
        """Tell how many comparisons follow in this part: they share its time."""
        self._left = self._expected = max(comparisons, 1)

    def at(self, what: str, fraction: float = 0.0) -> None:
        """Say what is being done, and how much of the comparison is behind it."""
        done = self._expected - self._left + fraction
        self._progress.at(what, min(done / self._expected, 1.0))

    def seconds_left(self) -> float:
        """The next comparison's share of the part's time; 0 where it has none left."""
        return max(self._deadline_s - time.monotonic(), 0.0) / max(self._left, 1)

    def take_turns(
        self, what: str, sides: Mapping[str, Callable[[], T]], *, rounds: int = 0, warm_up: bool = True
    ) -> dict[str, list[T]]:
        """Rounds of one comparison: as many as `rounds` (0: the run's own) and the time allow."""
        most, began_s = rounds or self.rounds, time.monotonic()
        limit = RoundLimit(self.seconds_left())

        def may_go_on(number: int, done: int) -> bool:
            if not limit.allows(number, done, time.monotonic() - began_s):
                return False
            step = f"round {number + 1} of at most {most}" if number >= 0 else "warm-up"
            self.at(f"{what}: {step}", max(number, 0) / most)
            return True

        found = interleaved(sides, most, warm_up=warm_up, may_go_on=may_go_on)
        self._close(what, len(next(iter(found.values()))), most, "rounds")
        return found

    def take_timed_turns(self, what: str, works: Mapping[str, Callable[[], float]]) -> dict[str, list[Measured]]:
        """`take_turns` over plain work, of which all is timed."""
        return self.take_turns(what, {name: partial(clocked, work) for name, work in works.items()})

    def cases(self, what: str, names: Sequence[str]) -> Iterator[str]:
        """These cases, one after another, as far as the time allows."""
        done = 0
        for done, name in enumerate(cases_in_time(names, self.seconds_left()), start=1):
            self.at(f"{what}: {done} of {len(names)}, {name}", (done - 1) / len(names))
            yield name
        self._close(what, done, len(names), "cases")

    def call(self, target: str, arguments: dict[str, Any], *, ranks: int = 0, started_by: Sequence[str] = ()) -> Any:
        """A function in processes of its own (`processes.call`), whose lines are this part's progress."""
        return call(target, arguments, ranks=ranks, started_by=started_by, at=self._progress.at)

    def call_within(
        self, what: str, target: str, arguments: dict[str, Any], *, ranks: int, most: int, kind: str
    ) -> Any:
        """The same as one comparison, with its share of the time as the argument `seconds` (None: no limit).

        It returns a pair: how many of `most` rounds or cases the time allowed, and its result.
        """
        seconds = self.seconds_left()
        limit = {"seconds": seconds if math.isfinite(seconds) else None}
        self.at(f"{what}: {ranks} processes")
        done, found = self.call(target, arguments | limit, ranks=ranks)
        self._close(what, done, most, kind)
        return found

    def _close(self, what: str, done: int, most: int, kind: str) -> None:
        self._left = max(self._left - 1, 0)
        if done < most:
            self._cut.append(f"{self.part}: {what}, {done} of {most} {kind}")


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does. Once: what follows, another leaves in peace.

    Python drops an exception that is raised in a finalizer, such as a weak reference's. It is raised again then.
    """

    def stop(_number: int, _frame: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def dropped(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            hook(unraisable)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before, hook = {number: signal.getsignal(number) for number in numbers}, sys.unraisablehook
    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def cases_in_time(
    names: Sequence[str], seconds: float, agreed: Callable[[bool], bool] = lambda may_go_on: may_go_on
) -> Iterator[str]:
    """As many of these as the time allows, at least one, from everywhere in the list: an even stride, again and again.

    `agreed` is asked before every case, so that all ranks of a job go on or none.
    """
    began_s, limit, stride = time.monotonic(), RoundLimit(seconds, least=1), math.isqrt(len(names)) or 1
    ordered = [name for start in range(stride) for name in names[start::stride]]
    for done, name in enumerate(ordered):
        if not agreed(limit.allows(done, done, time.monotonic() - began_s)):
            return
        yield name


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    parse.__name__ = "number above 0"
    return parse
