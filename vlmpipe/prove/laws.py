"""The laws, each with how it is checked, the known causes of a breach and their cures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from vlmpipe.prove.losses import LABELLINGS, SPANS, SampleLoss, difference, is_close, sample_mean, token_mean
from vlmpipe.prove.sample_set import NUM_SAMPLES
from vlmpipe.prove.trainer_runs import LONG_STEPS, Ended, Start, Trainer
from vlmpipe.trainer.errors import ExitCode, UserError

State = Literal["holds", "does not hold", "not run", "not asked"]
Losses = Mapping[str, Sequence[SampleLoss]]  # by labelling, of each sample
STEPS, LONGER, EXPORTED = 3, 6, 2
# Four steps an epoch: training is continued in the middle of one.
QUARTER = Start(micro_batch_size=8, global_batch_size=8, steps=LONGER)
HALF = replace(QUARTER, steps=STEPS, checkpoint_every_steps=STEPS)
MISSING_KEYS = "missing keys in the checkpoint model loaded"


@dataclass(frozen=True)
class Verdict:
    """Result of a law. `found` says by how much."""

    law: str
    title: str
    state: State
    found: str
    cause: str = ""
    cure: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Breach:
    """How a law is broken."""

    found: str
    cause: str = ""
    cure: str = ""


class NotRunError(Exception):
    """A start that a law needs failed."""


class NotAskedError(Exception):
    """A law about something that the trainer does not have."""


class Proof:
    """Checks laws on one trainer. Starts that several laws need are made once."""

    def __init__(self, trainer: Trainer, reference: Callable[[Path | None], Losses]) -> None:
        """reference: losses of the training samples by the model in a folder; None: the one that is trained."""
        self._trainer, self._reference = trainer, reference
        self._made: dict[tuple[str, Start], Ended] = {}

    def verdicts(self, names: Sequence[str]) -> Iterator[Verdict]:
        """The verdict on each of these laws, as they are reached."""
        for name in names:
            title, check = LAWS[name]
            started = time.monotonic()
            state, breach = self._judged(check)
            seconds = round(time.monotonic() - started, 1)
            yield Verdict(name, title, state, breach.found, breach.cause, breach.cure, seconds)

    def _judged(self, check: Callable[[Proof], str | Breach]) -> tuple[State, Breach]:
        try:
            outcome = check(self)
        except NotAskedError as error:
            return "not asked", Breach(str(error))
        except NotRunError as error:
            return "not run", Breach(str(error))
        except UserError as error:
            return "not run", Breach(error.found)
        return ("does not hold", outcome) if isinstance(outcome, Breach) else ("holds", Breach(outcome))

    def labels(self) -> str | Breach:
        labelling, _ = self._explained
        loss = f"loss {_shown(self._first_loss)}"
        if labelling == SPANS:
            return f"{loss} is that of {SPANS}"
        if labelling:
            return Breach(
                f"{loss} is that of {labelling}, not of {SPANS} ({_shown(token_mean(self._initial[SPANS]))})",
                cause="the trainer finds answers by its own rule, not by the chat template",
                cure="tell it which tokens are answers, or accept that more or fewer tokens are learned",
            )
        known = ", ".join(f"{name} {_shown(token_mean(losses))}" for name, losses in self._initial.items())
        return Breach(f"{loss} matches no known labelling: {known}")

    def token_mean(self) -> str | Breach:
        labelling, averaging = self._explained
        if averaging == "tokens":
            return f"loss {_shown(self._first_loss)} = reference {_shown(token_mean(self._initial[labelling]))}"
        if averaging == "samples":
            return Breach(
                f"loss {_shown(self._first_loss)} is the mean of the samples' means; over tokens it is "
                f"{_shown(token_mean(self._initial[labelling]))}",
                cause="each sample is averaged by itself, so that tokens of short answers weigh more",
                cure="sum the loss of all label tokens and divide once by their number",
            )
        return Breach(f"loss {_shown(self._first_loss)} is no mean of the reference's losses")

    def processes(self) -> str | Breach:
        single = self._ended("one", Start(steps=STEPS))
        others = {n: self._ended(f"of-{n}", Start(n, NUM_SAMPLES // n, steps=STEPS)) for n in (2, 4)}
        worst = max(others, key=lambda n: difference(others[n].losses, single.losses))
        text = f"N=1 and N={worst}: {_compared(single.losses, others[worst].losses)}"
        if all(is_close(other.losses, single.losses) for other in others.values()):
            return text
        return Breach(
            text,
            cause="each process divides by its own label tokens, and the means are averaged",
            cure="divide by the label tokens of all processes; transformers' Trainer does not for classes with "
            "accepts_loss_kwargs = False (Qwen2.5-VL, Qwen3-VL, Gemma 3), whatever average_tokens_across_devices says",
        )

    def accumulation(self) -> str | Breach:
        if not self._trainer.accumulates:
            raise NotAskedError("train.trainer.command takes no size of micro-batches")
        single = self._ended("one", Start(steps=STEPS))
        eight = self._ended("accumulated", Start(micro_batch_size=4, steps=STEPS))
        text = f"1 micro-batch and 8: {_compared(single.losses, eight.losses)}"
        if is_close(eight.losses, single.losses):
            return text
        return Breach(
            text,
            cause="each micro-batch is averaged by itself, and the means are averaged",
            cure="count the label tokens of all micro-batches of a step before the first one",
        )

    def resume(self) -> str | Breach:
        if not self._trainer.resumes:
            raise NotAskedError("train.trainer has no resume_args: it starts from the beginning after an interruption")
        self._require_constant_rate()
        whole, second = self._ended("whole", QUARTER), self._ended("continued", replace(HALF, steps=LONGER))
        if second.resumed_from_step != STEPS:
            return Breach(f"no checkpoint of step {STEPS} was continued", cause="none was saved, or none is complete")
        later, expected = (
            {step: ended.losses[step] for step in range(STEPS + 1, LONGER + 1)} for ended in (second, whole)
        )
        text = f"continued after step {STEPS}: {_compared(expected, later)}"
        if is_close(later, expected):
            return text
        if MISSING_KEYS in second.output:
            return Breach(
                text,
                cause="weights are not restored: their names in the checkpoint are not those of the model",
                cure="train.trainer.resume_as_model: true starts from the checkpoint's model",
            )
        return Breach(
            text,
            cause="weights, optimizer, learning rate or the order of the data are not restored",
            cure="if the weights are what is lost: train.trainer.resume_as_model: true",
        )

    def text_only(self) -> str | Breach:
        start = Start(2, micro_batch_size=1, steps=EXPORTED, text_only=True)
        ended = self._trainer.start("text-only", start)
        if ended.timed_out:
            return Breach(
                f"no end in time; the last step logged is {max(ended.losses, default=0)}",
                cause="a process without an image skips collectives that the others wait in",
                cure="run the projector on an empty tensor there, or put an image into every micro-batch",
            )
        self._require(ended, start)
        return f"{EXPORTED} steps of micro-batches with and without images on 2 processes"

    def packing(self) -> str | Breach:
        if not self._trainer.packs:
            raise NotAskedError("the contract has no setting for packing")
        single = self._ended("one", Start(steps=STEPS))
        packed = self._ended("packed", Start(packed=True, steps=STEPS))
        text = f"32 sequences and 1: {_compared(single.losses, packed.losses)}"
        if is_close(packed.losses, single.losses):
            return text
        return Breach(text, cause="samples of a packed sequence see each other, or their positions go on")

    def export(self) -> str | Breach:
        single, ended = self._ended("one", Start(steps=STEPS)), self._ended("exported", Start(steps=EXPORTED))
        expected = single.losses[EXPORTED + 1]
        labelling, averaging = self._explained
        losses = self._reference(self._trainer.export(ended))[labelling or SPANS]
        exported = sample_mean(losses) if averaging == "samples" else token_mean(losses)
        text = f"the export has loss {_shown(exported)}, training went on with {_shown(expected)}"
        if is_close({0: exported}, {0: expected}):
            return text
        self._require_constant_rate()
        return Breach(text, cause="what is exported is not what was trained, or not all of it")

    def stopped(self) -> str | Breach:
        start = replace(QUARTER, steps=LONG_STEPS, stop_after_step=2)
        ended = self._trainer.start("stopped", start)
        if not ended.timed_out and max(ended.losses, default=0) < start.stop_after_step:
            raise NotRunError(f"it ended before it was stopped, with exit code {ended.exit_code}: {ended.last_line}")
        made = f"SIGTERM after step {max(ended.losses, default=0)} of {LONG_STEPS}"
        if ended.timed_out:
            return Breach(f"{made}: it did not end in time", cause="SIGTERM is ignored")
        if ended.own_exit_code == 0:
            told = f"; the launcher counts steps, and says {ended.exit_code}" if ended.exit_code else ""
            return Breach(
                f"{made}: exit code 0{told}",
                cause="it saves a model and ends as if it were done",
                cure=f"end with code {int(ExitCode.PREEMPTED)} when fewer steps are made than asked for",
            )
        return f"{made}: exit code {ended.own_exit_code}"

    def _require_constant_rate(self) -> None:
        """Raise NotRunError where the first steps depend on how many will follow."""
        whole, half = self._ended("whole", QUARTER).losses, self._ended("continued", HALF).losses
        if not is_close(half, {step: whole[step] for step in half}):
            raise NotRunError(
                f"the first steps depend on max_steps ({_compared(whole, half)}): the command must take "
                "{lr_schedule} or keep a constant rate"
            )

    @property
    def _first_loss(self) -> float:
        return self._ended("one", Start(steps=STEPS)).losses[1]

    @cached_property
    def _initial(self) -> Losses:
        return self._reference(None)

    @cached_property
    def _explained(self) -> tuple[str, Literal["tokens", "samples", ""]]:
        """Labelling and mean that explain the first loss; empty where none fits."""
        for labelling, losses in ((name, self._initial[name]) for name in LABELLINGS):
            if is_close({1: self._first_loss}, {1: token_mean(losses)}):
                return labelling, "tokens"
            if is_close({1: self._first_loss}, {1: sample_mean(losses)}):
                return labelling, "samples"
        return "", ""

    def _ended(self, run_id: str, start: Start) -> Ended:
        """A start that went well. Raises NotRunError for others."""
        if (run_id, start) not in self._made:
            ended = self._trainer.start(run_id, start)
            self._require(ended, start)
            self._made[run_id, start] = ended
        return self._made[run_id, start]

    def _require(self, ended: Ended, start: Start) -> None:
        if ended.timed_out:
            raise NotRunError(f"no end in time; the last step logged is {max(ended.losses, default=0)}")
        if ended.exit_code:
            raise NotRunError(f"exit code {ended.exit_code}: {ended.last_line}")
        if missing := [step for step in range(1, start.steps + 1) if step not in ended.losses]:
            raise NotRunError(f"no loss was logged for step {missing[0]} of {start.steps}")
        if bad := [step for step, loss in ended.losses.items() if not math.isfinite(loss)]:
            raise NotRunError(f"the loss of step {bad[0]} is {ended.losses[bad[0]]}")


# Name -> what is said of it, and its check, in the order in which they are made.
LAWS: dict[str, tuple[str, Callable[[Proof], str | Breach]]] = {
    "labels": ("Labels are the answers of the chat template", Proof.labels),
    "token-mean": ("The loss is the mean over label tokens", Proof.token_mean),
    "processes": ("1, 2 and 4 processes give the same training", Proof.processes),
    "accumulation": ("Accumulation changes nothing", Proof.accumulation),
    "packing": ("Packing changes nothing", Proof.packing),
    "resume": ("Continued equals uninterrupted", Proof.resume),
    "text-only": ("Samples without images do not hang", Proof.text_only),
    "export": ("The export is what was trained", Proof.export),
    "stopped": ("Stopped is not done", Proof.stopped),
}


def _shown(loss: float) -> str:
    return f"{loss:.6f}"


def _compared(expected: Mapping[int, float], actual: Mapping[int, float]) -> str:
    """The step with the largest difference, and the difference."""
    common = sorted(expected.keys() & actual.keys())
    if not common:
        return "no step in common"
    worst = max(common, key=lambda step: abs(actual[step] - expected[step]))
    relative = abs(actual[worst] - expected[worst]) / abs(expected[worst])
    return f"{_shown(expected[worst])} and {_shown(actual[worst])} at step {worst}, a difference of {relative:.1e}"
