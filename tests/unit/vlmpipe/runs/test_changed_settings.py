"""Every field of the run file has a rule for a run that is continued, and what changes between two files is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, JsonValue

from tests.support.paths import ROOT
from tests.support.resume_page import RULES_OF_ALL
from tests.support.trainer.checkpoints import record
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.runs.changed_settings import REST, changed_settings, require_resumable, rule_of
from vlmpipe.trainer.checkpoint.resume_rules import SECTIONS, SELECTION_REWARD, leaves, rules_by_field, settings_of
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import crc32c_of
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

FILE = ROOT / "configs/digits.yaml"
MIXTURE = (
    "data.source=",
    "data.sources=[{name: one, uri: builtin:digits, weight: 1.0}, {name: two, uri: builtin:openmoji, weight: 2.0}]",
)


ZERO = "train.strategy=zero2"
SWEEP = "sweep={variants: {low: {train.clip_grad_norm: 0.5}, high: {train.clip_grad_norm: 2.0}}}"


def of(*overrides: str) -> RunConfig:
    return load_run_file(FILE, overrides)


def fields(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield field.alias or name


def test_every_section_has_a_rule_and_no_rule_a_section_or_field_that_is_gone() -> None:
    for name in fields(RunConfig):
        if name not in SECTIONS:
            assert rule_of(name)
    with pytest.raises(KeyError):
        rule_of("of_another_version")
    listed = [name for rule in REST for name in rule.fields]
    assert len(listed) == len(set(listed)) and not set(listed) & rules_by_field().keys()
    content = of("checkpoint.signing_key_file=").to_dict()
    for name in listed:
        section, _, field = name.partition(".")
        assert section in fields(RunConfig) and (not field or field in content[section]), name


def test_a_field_of_every_section_that_training_reads_is_seen_to_change() -> None:
    """Of fields that this run file has: sections that are null are tried below."""
    base = of().to_dict()
    seen = set()
    for name, section in SECTIONS.items():
        for path, _, _ in leaves(section, name):
            value: Any = base
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            changed = json.loads(json.dumps(base))
            below = changed
            *above, last = path.split(".")
            for part in above:
                below = below.get(part) or {} if isinstance(below, dict) else {}
            if last not in below:
                continue
            below[last] = "another"
            from vlmpipe.runs.changed_settings import _leaves

            before, after = dict(_leaves("", base)), dict(_leaves("", changed))
            assert {field for field in after if after[field] != before.get(field)} == {path}
            seen.add(path)
    assert len(seen) > 120


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((), ("train.epochs=9",), {"train.epochs": "taken"}),
        ((), ("train.seed=9",), {"train.seed": "refused"}),
        ((), ("data.max_samples=9",), {"data.max_samples": "prepared"}),
        ((), ("register.alias=staging", "gate.max_loss=3"), {"register.alias": "same", "gate.max_loss": "same"}),
        ((), ("notify.email=[a@example.com]",), {"notify.email": "same"}),
        ((), ("cluster.env={A: b}",), {"cluster.env.A": "same"}),
        ((), ("checkpoint.signing_key_file=/k",), {"checkpoint.signing_key_file": "refused"}),
        ((), ("model.lora={rank: 4}",), {"model.lora.rank": "refused"}),
        (MIXTURE, (MIXTURE[0], MIXTURE[1].replace("2.0", "3.0")), {"data.sources[].weight": "refused"}),
        (("train.strategy=zero1",), ("train.strategy=zero2",), {"train.strategy": "same"}),
        ((), ("train.strategy=fsdp",), {"train.strategy": "same"}),
        ((), ("train.strategy=zero2",), {"train.strategy": "same"}),
        ((ZERO,), (ZERO, "cluster.replica_count=1"), {"cluster.replica_count": "same"}),
        ((), ("cluster.replica_count=1",), {"cluster.replica_count": "same"}),
        ((), (SWEEP,), None),
    ],
)  # fmt: skip
def test_what_has_changed_is_found_with_its_outcome(
    before: tuple[str, ...], after: tuple[str, ...], found: dict[str, str] | None
) -> None:
    changes = {change.field: change.outcome for change in changed_settings(of(*before), of(*after)).all}
    if found is None:
        assert changes and all(field.startswith("sweep") for field in changes)
        return
    # A section that was null brings its other fields' defaults.
    assert found.items() <= changes.items()
    assert {field.split(".")[:2][-1] for field in changes} == {field.split(".")[:2][-1] for field in found}


def test_settings_of_a_program_of_ones_own_are_its_own() -> None:
    program = ("train.trainer={name: mine, command: [python, t.py], data_format: none}", "features.cache=off")
    after = of(*program, "train.seed=9", "model.seed=3")
    outcomes = {change.field: change.outcome for change in changed_settings(of(*program), after).all}
    assert outcomes == {"train.seed": "taken", "model.seed": "refused"}


@pytest.fixture
def started(tmp_path: Path) -> RunPaths:
    """A run that another start has left, with its run.json."""
    paths = RunPaths(run_id="r", root_uri=str(tmp_path))
    write_record(LocalStorage(paths.run_uri), "run.json", of().to_run_json(paths))
    return paths


def test_the_first_step_refuses_what_training_would(started: RunPaths) -> None:
    require_resumable(of("train.seed=5"), started)  # nothing is saved yet
    LocalStorage(started.run_uri).write("checkpoints/0001-00000004-ab/COMMIT", b"{}")
    require_resumable(of("evaluate.batch_questions=8", "train.optimizer.learning_rate=1e-4"), started)
    with pytest.raises(ConfigError, match=r"run r has checkpoints .*: train\.seed changed from 0 to 5"):
        require_resumable(of("train.seed=5"), started)
    require_resumable(of("train.seed=5", "train.resume=never"), started)


@pytest.mark.parametrize("has_run_json", [True, False])
def test_the_first_step_refuses_a_reward_that_only_the_checkpoint_records(
    has_run_json: bool, started: RunPaths
) -> None:
    """Decision 0080: selections of earlier versions were drawn with another reward, which no run file has."""
    config = load_run_file(ROOT / "configs/arr-coc.yaml").stage_runs()["relevance"]
    store = LocalStorage(started.run_uri)
    written = config.to_run_json(started) if has_run_json else {"name": "digits", "of_old": 1}
    write_record(store, "run.json", written)
    now = settings_of(config)

    def save(settings: dict[str, JsonValue]) -> None:
        text = record(settings=settings).text()
        store.write("checkpoints/0001-00000004-ab/COMMIT", b"%b\n%08x" % (text, crc32c_of(text)))

    save(now)
    require_resumable(config, started)
    save({name: value for name, value in now.items() if name != SELECTION_REWARD})
    with pytest.raises(ConfigError, match=f"run r has checkpoints .*: {SELECTION_REWARD} changed from") as refused:
        require_resumable(config, started)
    assert refused.value.fix.startswith("continue with the vlmpipe that began it, give another run id (--run-id)")
    afresh = config.model_copy(update={"train": config.train.model_copy(update={"resume": "never"})})
    require_resumable(afresh, started)
    save({**now, "train.of_later": 1})
    with pytest.raises(ConfigError, match=r"train\.of_later was 1, a field that only the vlmpipe that saved it has"):
        require_resumable(config, started)
    save(now)
    store.write("checkpoints/0001-00000004-ab/COMMIT", b"torn")
    require_resumable(config, started)  # training passes a damaged one over


def test_a_run_that_another_version_has_started_is_left_to_training(started: RunPaths) -> None:
    store = LocalStorage(started.run_uri)
    store.write("checkpoints/0001-00000004-ab/COMMIT", b"{}")
    write_record(store, "run.json", {"name": "digits", "of_old": 1})
    require_resumable(of("train.seed=5"), started)


def test_weights_of_another_stage_cannot_be_moved_under_a_run_that_has_checkpoints(tmp_path: Path) -> None:
    """Its checkpoints name the address that they were trained from, which training compares."""
    before, after = (RunPaths(run_id="r", root_uri=str(tmp_path / name)) for name in ("before", "after"))

    def on(paths: RunPaths) -> RunConfig:
        return of(f"model.projector={{weights: {paths.root_uri}/runs/base/export}}")

    store = LocalStorage(before.run_uri)
    write_record(store, "run.json", on(before).to_run_json(before))
    store.write("checkpoints/0001-00000004-ab/COMMIT", b"{}")
    assert require_resumable(on(before), before) == []
    Path(before.root_uri).rename(after.root_uri)
    with pytest.raises(ConfigError, match=r"model\.projector\.weights changed from .*before/runs/base/export"):
        require_resumable(on(after), after)
    require_resumable(of("train.resume=never"), after)


def test_the_page_has_a_row_for_every_rule() -> None:
    assert set(REST) <= set(RULES_OF_ALL)


def test_a_variable_that_may_hold_a_secret_is_named_without_its_value() -> None:
    before, after = (of(f"cluster.env={{OPTION: {value}}}") for value in ("one-value", "other"))
    assert changed_settings(before, after).texts() == ["cluster.env.OPTION changed"]
