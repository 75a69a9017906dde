"""Rules of a source that holds the start model's own answers (`replay: self`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.hooks.rules import obstacles_to

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def replay_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the problems of a run file with such a source; none without it."""
    field = replay_field(config)
    if not field:
        return
    model, train = config.model, config.train
    if drawn := [name for name, part in model.sources.items() if name != "tower" and (part is None or part.config)]:
        text = f"found self with model.{drawn[0]} drawn at random, whose answers are noise; expected weights, such as "
        yield Problem(field, f"{text}run:RUN_ID, or no replay")
    if model.tokenizer.startswith("train:"):
        text = f"found {model.tokenizer} with replay: self, whose model knows another one; expected the tokenizer of "
        yield Problem("model.tokenizer", f"{text}the start model, such as run:RUN_ID")
    yield from (Problem(field, reason) for reason in obstacles_to("replay", config))
    if train.trainer:
        text = "found self with train.trainer, whose model vlmpipe does not generate with; expected a source with the "
        yield Problem(field, f"{text}answers, by uri")
    for section in ("sweep", "tune"):
        if getattr(config, section):
            text = f"found with replay: self, whose answers its jobs do not generate; expected {section} null, or the "
            yield Problem(section, f"{text}answers of a run as a source by uri")


def replay_field(config: RunFields) -> str:
    """The field of the source with replay; empty without one."""
    return next((f"data.sources.{n}.replay" for n, source in enumerate(config.data.sources) if source.replay), "")


def stages_replay_problem(config: RunFields) -> Iterator[Problem]:
    """Yield the problem of stages of which one has such a source."""
    for content in config.stage_contents().values():
        data = content.get("data")
        sources = data.get("sources") if isinstance(data, Mapping) else None
        numbered = enumerate(sources) if isinstance(sources, list | tuple) else ()
        indices = [n for n, source in numbered if isinstance(source, Mapping) and source.get("replay")]
        if not indices:
            continue
        text = "found self with stages, of which a later one starts from a model that is not there yet; expected runs "
        yield Problem(f"data.sources.{indices[0]}.replay", f"{text}of their own, the second with weights: run:RUN_ID")
        return
