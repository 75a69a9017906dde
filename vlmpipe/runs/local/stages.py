"""The stages of a run: their folders, and which steps each has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.storage.records import read_record_file
from vlmpipe.config.sections.stages import STAGES_FOLDER, earlier_stages

if TYPE_CHECKING:
    from vlmpipe.runs.local.state import Step

RUN_FILE_COPY = "run_file.json"
STEPS = (
    "resolve-run",
    "prepare-data",
    "cache-features",
    "train",
    "sync-checkpoint",
    "evaluate",
    "benchmark",
    "decide",
    "register-model",
    "deploy-model",
    "notify",
)
OF_A_SWEEP = ("resolve-run", "prepare-data", "cache-features", "train-variants", "compare-variants")  # its last stage
DECIDING = ("decide", "compare-variants")  # the last step of a stage
OPTIONAL = ("benchmark", "deploy-model")  # a run without the section has no such step
OF_THE_RUN = ("register-model", "deploy-model", "notify")  # once, after all stages


def stage_folders(folder: Path) -> dict[str, Path]:
    """The folders of a run's stages by their names, in order; without stages its own, under an empty name."""
    names: list[str] = []
    with contextlib.suppress(UserError):
        names = [str(one["name"]) for one in read_record_file(folder / RUN_FILE_COPY).get("stages") or ()]
    if not names:  # also of a downloaded folder, which has no copy of the run file: the last one's name is not known
        names = [*earlier_stages(str(folder)), ""]
    return {name: folder / STAGES_FOLDER / name for name in names[:-1]} | {names[-1]: folder}


def is_sweep(folder: Path) -> bool:
    """Whether the run's last stage is a sweep."""
    with contextlib.suppress(UserError):
        return bool(read_record_file(folder / RUN_FILE_COPY).get("sweep"))
    return False


def steps_of(stages: Sequence[str], *, sweeps: bool = False) -> Iterator[tuple[str, str]]:
    """Stage and name of each step, in order. `sweeps`: the last stage is a sweep."""
    *earlier, last = stages
    of_a_stage = [name for name in STEPS if name not in OF_THE_RUN]
    for stage in earlier:
        yield from ((stage, name) for name in of_a_stage)
    yield from ((last, name) for name in (OF_A_SWEEP if sweeps else of_a_stage))
    yield from (("", name) for name in (("notify",) if sweeps else OF_THE_RUN))


def without_absent(steps: Iterable[Step]) -> list[Step]:
    """The steps, without optional ones that have not begun: most runs have none."""
    return [step for step in steps if step.name not in OPTIONAL or step.state not in ("waiting", "skipped")]


def with_reused_stages(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Of a stage that an earlier attempt of the run finished only the first step and the gate run: the rest is reused.

    The last stage's steps all run.
    """
    decided = [step.stage for step in steps if step.name in DECIDING and step.state not in ("waiting", "skipped")]
    last = [step.stage for step in steps if step.name in DECIDING][-1:]
    return tuple(
        replace(step, state="reused", message="accepted in an earlier attempt")
        if step.state in ("waiting", "skipped") and step.stage in decided and step.stage not in last and step.stage
        else step
        for step in steps
    )
