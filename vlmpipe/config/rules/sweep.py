"""Rules of a sweep. Refused: equal variants, fields that change nothing, and stages that are not shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlmpipe.config.sections.sweep import MAX_TRAININGS, WITHOUT_EFFECT, SweepConfig, Variant, baseline_of, variants_of
from vlmpipe.config.validation_errors import Problem, closest_field
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks.rules import rules_of

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def sweep_problems(config: RunFields, sweep: SweepConfig, runs: Mapping[str, RunFields]) -> Iterator[Problem]:
    """Yield the problems of a run file's sweep. The run file is valid without the sweep.

    Args:
        runs: the run file of each variant, by its name.
    """
    variants = variants_of(sweep)
    names = [variant.name for variant in variants]
    yield from _not_possible(config)
    if len(variants) < 2:
        yield Problem("sweep", f"found {len(variants)} variant, expected at least two, by variants or by grid")
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(f"sweep.variants.{name}", f"found {count} variants of this name, expected a name for each")
    if (trainings := len(variants) * sweep.starts) > MAX_TRAININGS:
        yield Problem("sweep", f"found {trainings:,} trainings, expected at most {MAX_TRAININGS:,}")
    known = set(names)
    asked: dict[str, tuple[str, ...]] = {"sweep.baseline": (baseline_of(sweep),)}
    for number, hypothesis in enumerate(sweep.hypotheses):
        asked[f"sweep.hypotheses.{number}"] = (hypothesis.variant, *hypothesis.against)
        if hypothesis.variant in hypothesis.against:
            yield Problem(f"sweep.hypotheses.{number}", f"found {hypothesis.variant} against itself")
    for field, used in asked.items():
        for name in used:
            if name not in known:
                closest = closest_field(name, names)
                hint = f"; did you mean {closest}?" if closest else f"; expected one of {', '.join(names)}"
                yield Problem(field, f"found {name}, which is no variant{hint}")
    yield from _without_effect(config, variants, runs)


def _not_possible(config: RunFields) -> Iterator[Problem]:
    """Sections that a sweep, which registers nothing and trains with our own trainer, has no use for."""
    sweep = config.sweep
    assert sweep
    for field in ("deploy", "tune"):
        if getattr(config, field):
            yield Problem(field, "found with sweep, which registers no model; expected null")
    *_, last = config.stage_runs().values()
    if last.train.trainer:
        yield Problem("train.trainer", "found with sweep, whose jobs run vlmpipe's trainer; expected null")
    if last.evaluate.lmms_eval:
        yield Problem("evaluate.lmms_eval", "found with sweep, whose jobs serve no model; expected null")
    if last.evaluate.audit:
        yield Problem("evaluate.audit", "found with sweep, whose jobs audit no data; expected null")
    if last.cluster.capacity_fallback:
        text = "found with sweep, whose jobs have one kind of machine each; expected scheduling_strategy alone"
        yield Problem("cluster.capacity_fallback", text)
    if last.data.tasks > 1:
        text = f"found {last.data.tasks} with sweep, which prepares each variant's data in one task; expected 1"
        yield Problem("data.tasks", text)
    if last.cluster.replica_count > 1 and sweep.trainings_per_job > 1:
        text = f"found {sweep.trainings_per_job} with cluster.replica_count {last.cluster.replica_count}; expected 1"
        yield Problem("sweep.trainings_per_job", f"{text}: nodes meet once for each job")


def _without_effect(config: RunFields, variants: list[Variant], runs: Mapping[str, RunFields]) -> Iterator[Problem]:
    *earlier, last = config.stage_runs()
    shared = {name: effective(run) for name, run in config.stage_runs().items()}
    effects = dict[str, dict[str, Any]]()
    for variant in variants:
        effects_of_stage = {name: effective(run) for name, run in runs[variant.name].stage_runs().items()}
        if changed := next((stage for stage in earlier if effects_of_stage[stage] != shared[stage]), ""):
            text = f"changes stage {changed}, which all variants share; expected fields of stages.{last}"
            yield Problem(f"sweep.variants.{variant.name}", text)
        effects[variant.name] = effects_of_stage[last]
    for number, variant in enumerate(variants):
        for other in variants[:number]:
            if variant.name != other.name and effects[variant.name] == effects[other.name]:
                text = f"trains the same as {other.name}; expected variants that differ in what a job reads"
                yield Problem(f"sweep.variants.{variant.name}", text)
    for field in dict.fromkeys(field for variant in variants for field in variant.values):
        using = (variant for variant in variants if field in variant.values)
        if not any(_changes(config, variant, field, effects[variant.name]) for variant in using):
            text = "changes nothing of any variant: they would train the same without it"
            yield Problem("sweep", f"found {field}, which {text}")


def _changes(config: RunFields, variant: Variant, field: str, whole: Mapping[str, object]) -> bool:
    """Return whether the variant differs from itself without that field."""
    values = {name: value for name, value in variant.values.items() if name != field}
    try:
        without = config.training_of(Variant(variant.name, values))
    except ConfigError:  # without the field it is not even valid
        return True
    return effective(without) != whole


def effective(run: RunFields) -> dict[str, object]:
    """Settings that decide a variant's model, its answers or its time; without fields that its own settings leave
    unread.
    """
    model = run.model
    for rules in rules_of(run):
        model = rules.effective(model)
    content = run.model_copy(update={"model": model}).to_dict()
    return {name: value for name, value in content.items() if name not in WITHOUT_EFFECT}
