"""Each law is found to hold for a trainer that keeps it, and only that law to be broken for one that does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from vlmpipe.prove.laws import LAWS, MISSING_KEYS, Losses, Proof, Verdict
from vlmpipe.prove.losses import LABELLINGS, SPANS, SampleLoss, is_close, sample_mean, token_mean
from vlmpipe.prove.trainer_runs import LONG_STEPS, Ended, Start
from vlmpipe.trainer.errors import UserError

LENGTHS = [5 + 3 * number % 11 for number in range(32)]
STARTING = 4.0  # the weight that training starts from


def losses(weight: float, labelling: str = SPANS) -> list[SampleLoss]:
    """Of samples whose tokens are the harder the longer the answer. Other labellings have another loss each."""
    harder = 1 + LABELLINGS.index(labelling) / 7
    return [SampleLoss(length * harder * (weight + length / 10), length) for length in LENGTHS]


@dataclass
class SoundTrainer:
    """Trains one weight, which falls with each step."""

    packs: bool = True
    resumes: bool = True
    accumulates: bool = True

    def start(self, run_id: str, start: Start) -> Ended:
        resumed = 3 if start == replace(start, steps=6, checkpoint_every_steps=3) else None
        if start.stop_after_step:
            return Ended({1: self.loss(0, start), 2: self.loss(1, start)}, 75)
        return Ended({step: self.loss(step - 1, start) for step in range(1, start.steps + 1)}, 0, "", False, resumed)

    def export(self, ended: Ended) -> Path:
        return Path(str(len(ended.losses)))

    def loss(self, steps: int, start: Start) -> float:
        return token_mean(losses(STARTING - steps))


def reference(folder: Path | None) -> Losses:
    """The export's folder is named after the steps that were made."""
    return {name: losses(STARTING - int(str(folder or 0)), name) for name in LABELLINGS}


def judged(trainer: SoundTrainer, *names: str) -> dict[str, Verdict]:
    return {verdict.law: verdict for verdict in Proof(trainer, reference).verdicts(names or tuple(LAWS))}


def test_all_laws_hold_for_a_sound_trainer() -> None:
    assert {name: one.state for name, one in judged(SoundTrainer()).items()} == dict.fromkeys(LAWS, "holds")


class MeansOfRanks(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return super().loss(steps, start) + 1e-3 * (start.processes > 1)


class MeansOfMicroBatches(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return super().loss(steps, start) + 1e-3 * (start.micro_batch_size == 4)


class MeansOfSamples(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return sample_mean(losses(STARTING - steps))


class LabelsLineEnds(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return token_mean(losses(STARTING - steps, LABELLINGS[1]))


class LabelsNothingKnown(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return super().loss(steps, start) + 0.5


class ForgetsWeights(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        ended = super().start(run_id, start)
        if not ended.resumed_from_step:
            return ended
        anew = {step: loss if step <= 3 else self.loss(step - 4, start) for step, loss in ended.losses.items()}
        return replace(ended, losses=anew, output=f"There were {MISSING_KEYS}: visual.")


class StartsAnew(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        return replace(super().start(run_id, start), resumed_from_step=None)


class LeaksBetweenSamples(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return super().loss(steps, start) * (1 + 1e-4 * start.packed)


class HangsWithoutPictures(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        ended = super().start(run_id, start)
        return replace(ended, losses={1: 1.0}, exit_code=-9, timed_out=True) if start.text_only else ended


class ExportsWhatItStartedWith(SoundTrainer):
    def export(self, ended: Ended) -> Path:
        return Path("0")


class DoneWhenStopped(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        ended = super().start(run_id, start)
        told = "launcher: train.trainer toy ended with exit code 0\n"
        return replace(ended, output=told) if start.stop_after_step else ended


@pytest.mark.parametrize(
    ("kind", "broken", "said"),
    [
        (MeansOfRanks, ["processes"], "N=1 and N=2"),
        (MeansOfMicroBatches, ["accumulation"], "averaged by itself"),
        (MeansOfSamples, ["token-mean"], "is the mean of the samples' means"),
        (LabelsLineEnds, ["labels"], "the line end after each, not of the answers with their end marks"),
        (LabelsNothingKnown, ["labels", "token-mean", "export"], "no known labelling"),
        (ForgetsWeights, ["resume"], "resume_as_model: true starts from the checkpoint's model"),
        (StartsAnew, ["resume"], "no checkpoint of step 3 was continued"),
        (LeaksBetweenSamples, ["packing"], "see each other"),
        (HangsWithoutPictures, ["text-only"], "no end in time; the last step logged is 1"),
        (ExportsWhatItStartedWith, ["export"], "is not what was trained"),
        (DoneWhenStopped, ["stopped"], "exit code 0; the launcher counts steps, and says 75"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_broken_law_is_named_with_its_cause(kind: Callable[[], SoundTrainer], broken: list[str], said: str) -> None:
    verdicts = judged(kind())
    assert [name for name, one in verdicts.items() if one.state != "holds"] == broken
    first = verdicts[broken[0]]
    assert first.state == "does not hold" and said in f"{first.found} {first.cause} {first.cure}"


class Fails(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        if start.processes > 1:
            raise UserError("train.strategy is single")
        ended = super().start(run_id, start)
        if start.packed:
            return replace(ended, losses=ended.losses | {2: math.nan})
        return (
            replace(ended, exit_code=1, output="reading\nno such model\n\n") if start.micro_batch_size == 4 else ended
        )


def test_a_start_that_fails_is_no_verdict() -> None:
    found = {name: (one.state, one.found) for name, one in judged(Fails()).items() if one.state != "holds"}
    assert found == {
        "processes": ("not run", "train.strategy is single"),
        "accumulation": ("not run", "exit code 1: no such model"),
        "packing": ("not run", "the loss of step 2 is nan"),
        "text-only": ("not run", "train.strategy is single"),
    }


class NeverStarts(SoundTrainer):
    def start(self, run_id: str, start: Start) -> Ended:
        return Ended({}, 1, "no such module\n")


def test_a_trainer_that_never_starts_keeps_no_law() -> None:
    verdicts = judged(NeverStarts())
    assert {one.state for one in verdicts.values()} == {"not run"}
    assert verdicts["stopped"].found == "it ended before it was stopped, with exit code 1: no such module"


class DecaysTheRate(SoundTrainer):
    def loss(self, steps: int, start: Start) -> float:
        return token_mean(losses(STARTING - steps * (1 + 1 / start.steps)))


def test_a_schedule_that_depends_on_the_steps_is_no_verdict() -> None:
    found = judged(DecaysTheRate(), "resume", "export")
    assert {one.state for one in found.values()} == {"not run"}
    assert all("the first steps depend on max_steps" in one.found for one in found.values())


def test_what_a_trainer_lacks_is_not_asked() -> None:
    verdicts = judged(SoundTrainer(packs=False, resumes=False, accumulates=False))
    assert [name for name, one in verdicts.items() if one.state == "not asked"] == ["accumulation", "packing", "resume"]


def test_starts_are_shared_between_laws() -> None:
    made: list[tuple[str, Start]] = []

    class Counting(SoundTrainer):
        def start(self, run_id: str, start: Start) -> Ended:
            made.append((run_id, start))
            return super().start(run_id, start)

    judged(Counting())
    assert len(made) == len(set(made)) == 11
    assert [start.steps for _, start in made if start.stop_after_step] == [LONG_STEPS]


@pytest.mark.parametrize(
    ("found", "expected", "close"),
    [
        ({1: 5.899828}, {1: 5.899827}, True),
        ({1: 5.8998}, {1: 5.899827}, True),  # four digits were logged
        ({1: 5.899828}, {1: 5.907245}, False),
        ({1: 5.9, 2: 5.8}, {1: 5.9}, False),
        ({1: math.nan}, {1: 5.9}, False),
    ],
)
def test_losses_are_close_within_rounding(found: dict[int, float], expected: dict[int, float], close: bool) -> None:
    assert is_close(found, expected) == close
