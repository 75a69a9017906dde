"""Facts about a source from a look at its first samples: sizes, tokens, splits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.accounting.coverage import Coverage
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.prepare.validation.deduplicate import NEW
from vlmpipe.trainer.data.prepare.validation.final_ids import final_entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample, stable_shuffle
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError

BUDGET_S = 10.0
MAX_READ, MAX_CHECKED = 5_000, 200  # samples


@dataclass
class Facts:
    """is_part: there are more samples than were read. Lengths and sizes are those of the `checked` samples.

    answers: of how many questions each answer is the right one. answer_tokens: of the longest answer.
    """

    coverage: Coverage = field(default_factory=Coverage)
    read: int = 0
    is_part: bool = False
    bad: list[Reject] = field(default_factory=list)
    splits: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    words: set[str] = field(default_factory=set)
    checked: int = 0
    images: Counter[str] = field(default_factory=Counter)  # digests of the checked samples' images, and their number
    sizes: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answer_tokens: int = 0

    @property
    def distinct_images(self) -> int:
        """An estimate of all samples' distinct images, of those that were checked once and twice (Chao 1984, Scand. J.
        Statist. 11, p. 265, with the correction for none twice)."""
        seen, (once, twice) = len(self.images), (list(self.images.values()).count(times) for times in (1, 2))
        unseen = once * (once - 1) // (2 * (twice + 1)) if self.is_part or self.checked < self.read else 0
        return seen + unseen

    @property
    def middle_size(self) -> tuple[int, int]:
        """The image of median area; 0 x 0 without images."""
        ordered = sorted(self.sizes, key=lambda size: size[0] * size[1])
        return ordered[len(ordered) // 2] if ordered else (0, 0)


def look(config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> Facts:
    """Look at the run file's source: up to MAX_READ samples, of which some are checked as preparation does.

    The run file's tokenizer is trained on the texts that were read. Raises DataError where no sample can be used.
    """
    facts, samples, started_s = Facts(), list[Sample](), clock()
    for record in open_source(config.data):
        if facts.read == MAX_READ or clock() - started_s > BUDGET_S / 2:
            facts.is_part = True
            break
        facts.read += 1
        if isinstance(record, Reject):
            facts.bad.append(record)
            continue
        facts.coverage.add(record)
        _count_texts(facts, record)
        samples.append(record)
    if not samples:
        why = facts.bad[0].sentence() if facts.bad else "it holds no samples"
        raise DataError(
            f"nothing of {config.data.source} can be read: {why}",
            expected="samples with an image and a text",
            fix="vlmpipe docs bring-your-own-data shows the forms, and how columns of other names are read",
        )
    facts.coverage.check(config.data.source)
    chosen = stable_shuffle(range(len(samples)), "look")[:MAX_CHECKED]
    texts = (text for sample in samples for turn in sample.turns for text in (turn.question, turn.answer))
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="init", root_uri="init")))
    chat = make_chat(config.model, config.data, texts)
    validate = SampleValidator(job, chat)
    for number in chosen:
        if facts.checked and clock() - started_s > BUDGET_S:
            break
        facts.checked += 1
        outcome = validate(final_entry(samples[number], NEW, "train"))
        if isinstance(outcome, Accepted):
            facts.sizes += [(image.width, image.height) for image in outcome.images]
            facts.images.update(image.sha256 for image in outcome.images)
            facts.tokens.append(len(outcome.encoded.input_ids))
            answers = (chat.tokenizer(turn.answer).input_ids for turn in outcome.turns)
            facts.answer_tokens = max(facts.answer_tokens, *map(len, answers))
        else:
            facts.bad.append(outcome)
    if not facts.tokens:
        raise DataError(f"none of {facts.checked:,} samples that were checked is good: {facts.bad[0].sentence()}")
    return facts


def _count_texts(facts: Facts, sample: Sample) -> None:
    facts.splits[sample.split or "none"] += 1
    for turn in sample.turns:
        facts.questions[turn.question.replace("<image>", "").strip()] += 1
        facts.answers[turn.answer] += 1
        if len(facts.words) < MAX_READ:
            facts.words.update(f"{turn.question} {turn.answer}".lower().split())


def power_of_two(value: float) -> int:
    """The smallest one that is not below `value`."""
    return 2 ** math.ceil(math.log2(max(1.0, value)))
