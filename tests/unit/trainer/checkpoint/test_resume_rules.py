"""Every field of `train`, `data` and `model` has a rule for a resume with another value, and the rule is what happens.

A changed copy of a run file is made for each field, whether or not its other fields go with the value: what decides is
what COMMIT records and what the prepared data is called. That values which are taken are trained with is shown by real
runs (tests/integration/trainer/checkpoint/test_changed_settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.support.resume_page import PAGE, resume_page
from tests.support.trainer.checkpoints import record
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.checkpoint.commit import Checkpoint
from vlmpipe.trainer.checkpoint.resume import Resumed, require_same_run
from vlmpipe.trainer.checkpoint.resume_rules import (
    OUTCOMES,
    RULES,
    SECTIONS,
    SELECTION_REWARD,
    Rule,
    as_trained,
    changes,
    leaves,
    rules_by_field,
    settings_of,
)
from vlmpipe.trainer.config.arr_coc.relevance import EARLIER_REWARD, REWARD, RelevanceConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.sources.data_fields import DataPhase
from vlmpipe.trainer.config.sources.data_source import DataSource
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.errors import ConfigError

FIELDS = {path: field for name, section in SECTIONS.items() for path, field, _ in leaves(section, name)}
# Of fields of `data` that preparation reads: another value that it can read.
OTHERS: dict[str, Any] = {
    "data.source": "builtin:openmoji",
    "data.chat_template": "native",
    "data.split_by": "record",
    "data.sources[].uri": "builtin:openmoji",
}


def job_of(**changes: Any) -> JobConfig:
    return JobConfig.model_validate(merged(TINY, {"run": {"run_id": "r", "root_uri": "/runs"}, **changes}))


@cache
def base_of(path: str) -> JobConfig:
    """A run file that has every section and a mixture where the field is one of its sources'."""
    job, data = job_of(), job_of().data
    if "[]" in path:
        source = DataSource(name="one", uri="builtin:digits", weight=1.0)
        phases = (DataPhase(weights={"one": 1.0}), DataPhase(weights={"one": 2.0}))
        job = job.model_copy(
            update={"data": data.model_copy(update={"source": "", "sources": (source,), "phases": phases})}
        )
    return job


def with_value(section: BaseModel, path: str, change: Any) -> BaseModel:
    """A copy of the section with `change(value)` at the path, unchecked. A null section on the way is filled in."""
    name, _, rest = path.partition(".")
    name, is_list = name.removesuffix("[]"), name.endswith("[]")
    value = getattr(section, name)
    if not rest:
        changed: Any = change(value)
    elif is_list:  # the last, such as a phase that has not begun
        changed = (*value[:-1], with_value(value[-1], rest, change))
    else:
        changed = with_value(value if value is not None else below(section, name), rest, change)
    return section.model_copy(update={name: changed})


def below(section: BaseModel, name: str) -> BaseModel:
    """The section that a null field may hold, of defaults."""
    annotation = type(section).model_fields[name].annotation
    (kind,) = (option for option in get_args(annotation) if option is not type(None))
    return kind.model_construct(**dict.fromkeys(kind.model_fields))


def other(field: FieldInfo, path: str) -> Any:
    """A function that gives another value of the field's type."""
    if path in OTHERS:
        return lambda _: OTHERS[path]
    kind = next(option for option in (*get_args(field.annotation), field.annotation) if option is not type(None))
    if get_origin(field.annotation) is Literal:
        return lambda value: next(option for option in get_args(field.annotation) if option != value)
    if get_origin(field.annotation) in (tuple, dict):
        kind = get_origin(field.annotation)

    def changed(value: Any) -> Any:
        if isinstance(value, bool) or kind is bool:
            return not value
        if isinstance(value, int | float):
            return value + 1
        if isinstance(value, tuple) or kind is tuple:
            return (*(value or ()), *((value or ())[:1] or ("other",)))
        if isinstance(value, dict) or kind is dict:
            return {**(value or {}), "other": 1}
        return f"{value or ''}other" if not isinstance(value, str) or kind is str else f"{value}other"

    return changed


def changed_job(path: str) -> JobConfig:
    name, _, rest = path.partition(".")
    job = base_of(path)
    return job.model_copy(update={name: with_value(getattr(job, name), rest, other(FIELDS[path], path))})


def refusal(before: JobConfig, after: JobConfig) -> str:
    """Why a checkpoint of the one is not continued by the other; empty where it is."""
    saved, expected = (
        record(
            settings=settings_of(job),
        )
        for job in (before, after)
    )
    try:
        require_same_run(Checkpoint("0001", saved), expected)
    except ConfigError as error:
        return error.found
    return ""


def test_every_field_has_exactly_one_rule_and_no_rule_a_field_that_is_gone() -> None:
    listed = [field for rule in RULES for field in rule.fields]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(FIELDS), "decide in RULES what a resume does with it"


def test_a_changed_field_is_refused_by_name_or_accepted_as_its_rule_says() -> None:
    for path, rule in ours():
        said = refusal(base_of(path), changed_job(path))
        if rule.outcome == "refused":
            assert path in said, (path, said)
        else:
            assert not said, path


def test_a_taken_value_is_said_and_one_that_cannot_matter_is_not() -> None:
    for path, rule in ours():
        before, after = settings_of(base_of(path)), settings_of(changed_job(path))
        found = changes(before, after)
        assert [change.field for change in found] == ([path] if rule.outcome in ("taken", "refused") else []), path


def test_a_job_as_it_was_trained_has_every_setting_that_a_resume_would_take() -> None:
    for path, rule in ours():
        if rule.outcome == "taken":
            before, after = base_of(path), changed_job(path)
            assert settings_of(as_trained(after, settings_of(before))) == settings_of(before), path
            assert settings_of(as_trained(after, settings_of(after))) == settings_of(after), path


def test_prepared_data_has_another_name_where_the_rule_says_so_and_nowhere_else() -> None:
    """Of the section `data`, which no other name covers."""
    for path, rule in ours():
        if path.startswith("data.") and path not in FROM_FILES:
            before, after = base_of(path), changed_job(path)
            assert (fingerprint(before) != fingerprint(after)) == (rule.outcome == "prepared"), path


# Fields that only say something of sources in files, of functions, of the start model's answers, whose folder they
# name, or of a list of exclusions; the fingerprints of those cover them.
FROM_FILES = {
    "data.exclude",
    "data.sources[].replay",
    "data.sources[].replay_about",
    "data.sources[].replay_images",
    "data.sources[].replay_prompts",
    "data.sources[].replay_max_new_tokens",
    "data.sources[].replay_seed",
    "data.image_folder",
    "data.sources[].image_folder",
    "data.source_arguments",
    "data.sources[].arguments",
}


def ours() -> Iterator[tuple[str, Rule]]:
    """The rules of our own trainer."""
    return ((path, rule) for path, rule in rules_by_field().items() if not path.startswith("train.trainer."))


def test_a_setting_that_this_version_does_not_have_is_refused() -> None:
    saved = record(settings={"train.of_another_version": 3})
    words = "train.of_another_version was 3, a field that only the vlmpipe that saved it has"
    with pytest.raises(ConfigError, match=words) as refused:
        require_same_run(Checkpoint("0001", saved), record())
    assert refused.value.fix.startswith("continue with that vlmpipe, or start a new run")


def drawing(estimator: str = "rloo") -> JobConfig:
    relevance = RelevanceConfig.model_validate({"max_tokens": 4, "estimator": estimator})
    model = job_of().model
    return job_of().model_copy(update={"model": model.model_copy(update={"relevance": relevance})})


def test_a_run_that_began_with_an_earlier_reward_is_refused_with_the_way_back() -> None:
    """Checkpoints of earlier versions record no reward; theirs was a log probability (decision 0080)."""
    now = settings_of(drawing())
    saved = record(settings={name: value for name, value in now.items() if name != SELECTION_REWARD})
    with pytest.raises(ConfigError) as refused:
        require_same_run(Checkpoint("0001", saved), record(settings=now))
    assert f'{SELECTION_REWARD} changed from "{EARLIER_REWARD}" to "{REWARD}"' in refused.value.found
    assert "reward that this run was begun with" in (refused.value.expected or "")
    assert refused.value.fix.startswith("continue with the vlmpipe that began it, or start a new run")


def test_a_run_with_its_own_reward_continues_and_one_that_draws_no_selections_has_none() -> None:
    assert settings_of(drawing())[SELECTION_REWARD] == REWARD
    assert not refusal(drawing(), drawing())
    assert SELECTION_REWARD not in settings_of(drawing("none")) | settings_of(job_of())
    assert not refusal(drawing("none"), drawing("none"))


def test_where_selections_begin_to_be_drawn_that_is_the_difference() -> None:
    (change,) = changes(settings_of(drawing("none")), settings_of(drawing()))
    assert (change.field, change.outcome) == ("model.relevance.estimator", "refused")


def test_other_prepared_data_may_be_that_of_another_version() -> None:
    with pytest.raises(ConfigError, match="the data or the packing plan changed") as refused:
        require_same_run(Checkpoint("0001", record(plan_sha256="a")), record(plan_sha256="b"))
    assert "or continue with the vlmpipe that began it, if another prepares other data" in refused.value.fix


def test_a_field_at_its_default_is_not_recorded_and_compared_all_the_same() -> None:
    assert "train.seed" not in settings_of(job_of())
    assert settings_of(job_of(**{"train.seed": 4}))["train.seed"] == 4
    assert "train.seed changed from 0 to 4" in refusal(job_of(), job_of(**{"train.seed": 4}))


@pytest.mark.parametrize("section", ["lora", "relevance"])
def test_a_field_that_a_later_version_adds_to_an_optional_section_is_no_change(section: str) -> None:
    """Checkpoints of versions without it are those of its default; the section itself may not come or go."""
    model = job_of().model
    kind = type(below(model, section))
    now = settings_of(job_of().model_copy(update={"model": model.model_copy(update={section: kind.model_construct()})}))
    fields = [field for field in now if field.startswith(f"model.{section}.")]
    for field in fields:
        older = {name: value for name, value in now.items() if name != field}
        assert changes(older, now) == changes(now, older) == []
        changed = older | {field: "another"}
        assert [change.outcome for change in changes(older, changed)] == [rules_by_field()[field].outcome]
    without = {name: value for name, value in now.items() if name not in fields}
    assert sorted(change.field for change in changes(without, now)) == sorted(fields)


def test_rates_that_jump_are_said_in_one_sentence_and_equal_ones_are_not() -> None:
    saved = record(step=90, total_steps=100, learning_rate=1e-4)
    resumed = Resumed(Checkpoint("0001-00000090-a", saved), [])
    (note,) = resumed.notes(replace(saved, total_steps=200), 2e-3)
    assert "continues at 0.002;" in note and "it would be 0.0001 (step 90 of 100 then, of 200 now)" in note
    assert not resumed.notes(saved, 1.001e-4)


def test_outcomes_are_those_of_the_rules() -> None:
    assert {rule.outcome for rule in RULES} == set(OUTCOMES)


def test_the_reference_has_the_table_of_the_rules() -> None:
    assert PAGE.read_text() == resume_page(PAGE.read_text()), "run: python -m tests.support.generated_files"
