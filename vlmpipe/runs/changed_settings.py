"""Changes to the run file of a continued run: a rule for each field, and the differences of two run files.

Fields of `train`, `data` and `model` have the rules of `vlmpipe.trainer.checkpoint.resume_rules`, by which training
itself decides; those of all other sections are here. docs/reference/resuming.md shows both as one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.run_settings import earlier_run_file
from vlmpipe.config.validation_errors import MAY_HOLD_SECRETS
from vlmpipe.trainer.checkpoint.commit import committed, read_commit
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.checkpoint.resume_rules import Change, Outcome, Rule, changes, rules_by_field, settings_of
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.external.checkpoints.states import states_of
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import RUN_FILE

# A name is a field, or a section whose other fields have no rule of their own.
REST: tuple[Rule, ...] = (
    Rule("refused", ("name", "stages"), "Which run it is. What a stage sets has the rules of its sections."),
    Rule("refused", ("checkpoint.signing_key_file",), "Checkpoints without its signature are not loaded."),
    Rule("taken", ("sweep",), "Which trainings there are. One that has begun has the rules of its sections."),
    Rule("same", ("evaluate", "gate", "register", "deploy", "notify"), "Steps after training."),
    Rule("same", ("features", "checkpoint"), "How images are encoded ahead, and how checkpoints are written and kept."),
    Rule(
        "same",
        ("version", "output", "cluster", "gcp", "kubeflow", "secrets", "plan"),
        "Where jobs run and runs lie, with which access, at what price.",
    ),
    Rule("same", ("schedule", "tune"), "Read by commands of their own."),
)
_ORDER: tuple[Outcome, ...] = ("refused", "prepared", "taken", "same")
_RULES = {**rules_by_field(), **{name: rule for rule in REST for name in rule.fields}}


def rule_of(field: str) -> Rule:
    """The rule of a field of the run file: its own, or its section's."""
    while field and field not in _RULES:
        field = field.rpartition(".")[0]
    return _RULES[field]


@dataclass(frozen=True)
class ChangedSettings:
    """Fields whose values differ between two run files, by stage; under an empty name where there are no stages."""

    by_stage: Mapping[str, list[Change]]

    @property
    def all(self) -> list[Change]:
        """Each change once, those that are refused first."""
        by_field = {
            (change.field, repr(change.now)): change for changes in self.by_stage.values() for change in changes
        }
        return sorted(by_field.values(), key=lambda change: _ORDER.index(change.outcome))

    @property
    def cannot_matter(self) -> bool:
        """Return whether the same weights are trained: any run of the earlier file may go on with the later one
        unasked.
        """
        return all(change.outcome == "same" for change in self.all)

    def texts(self) -> list[str]:
        """A sentence for each change, without values that may hold secrets."""
        hidden = [change.field.startswith(MAY_HOLD_SECRETS) for change in self.all]
        return [
            f"{change.field} changed" if hides else change.text()
            for change, hides in zip(self.all, hidden, strict=True)
        ]


def changed_settings(before: RunConfig, after: RunConfig) -> ChangedSettings:
    """Settings in which `after` differs from `before`."""
    old, new = before.stage_runs(), after.stage_runs()
    if list(old) != list(new):
        change = Change("stages", [*filter(None, old)], [*filter(None, new)], "refused")
        return ChangedSettings({stage: [change] for stage in old})
    changes = {stage: list(_changes(old[stage], new[stage])) for stage in old}
    if before.stages and before.sweep != after.sweep:
        changes[list(old)[-1]].append(Change("sweep", before.sweep is not None, after.sweep is not None, "taken"))
    return ChangedSettings(changes)


def _changes(before: RunConfig, after: RunConfig) -> Iterator[Change]:
    old, new = (dict(_leaves("", config.to_dict())) for config in (before, after))
    of_program = before.train.trainer is not None and after.train.trainer is not None
    for field in sorted(old.keys() | new.keys()):
        was, now = old.get(field), new.get(field)
        if was == now:
            continue
        outcome = rule_of(field).outcome
        if of_program and field.startswith(("train.", "data.")) and field != "train.trainer.name":
            outcome = "taken" if outcome == "refused" else outcome  # given to the program, whose checkpoint it is
        yield Change(field, was, now, outcome)


def _leaves(path: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """The values below a path by their fields, without nulls; of fields in a list of sections that of each item."""
    if (path in _RULES and not isinstance(value, dict)) or (path and path in rules_by_field()):
        yield path, value
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, below)
    elif isinstance(value, list) and any(field.startswith(f"{path}[].") for field in _RULES):
        items = [dict(_leaves(f"{path}[]", item)) for item in value]
        for field in dict.fromkeys(name for item in items for name in item):
            yield field, [item.get(field) for item in items]
    elif value is not None:
        yield path, value


def require_continuable(run_id: str, changed: ChangedSettings, stores: Mapping[str, Storage], after: RunConfig) -> None:
    """Raise ConfigError, which names the field, where a checkpoint cannot be continued with the changed value.

    Args:
        stores: the folder of each stage. What has no checkpoint, or gives up those that there are (train.resume=never),
            may begin with any settings.
    """
    runs = after.stage_runs()
    for stage, of_stage in changed.by_stage.items():
        run = runs.get(stage)
        if run and run.train.resume == "never":
            continue
        refused = [change for change in of_stage if change.outcome == "refused"]
        of_version = _of_other_version(stores[stage], run) if run else []
        saved = [*committed(stores[stage]), *committed(states_of(stores[stage].root_uri))] if refused else []
        if not (saved or of_version):
            continue
        where = f"stage {stage} of run {run_id}" if stage else f"run {run_id}"
        such_as = saved[-1] if saved else committed(stores[stage])[-1]
        way_back = "continue with the vlmpipe that began it" if of_version else "restore them"
        raise ConfigError(
            f"{where} has checkpoints (such as {such_as}) that cannot be continued: "
            f"{'; '.join(change.text() for change in [*refused, *of_version])}",
            expected="what it was started with; vlmpipe docs resuming says what may change",
            fix=f"{way_back}, give another run id (--run-id), or begin again in its folder: train.resume=never",
        )


def _of_other_version(store: Storage, run: RunConfig) -> list[Change]:
    """Changes that no run file shows: what the version that saved the newest checkpoint computed, and this one does
    not.

    A damaged checkpoint says nothing; training passes it over. Raises ConfigError as `read_commit`.
    """
    if not (saved := committed(store)):
        return []
    try:
        settings = read_commit(store, saved[-1]).settings
    except DamagedError:
        return []
    return [change for change in changes(settings, settings_of(run)) if change.is_gone or change.is_of_version]


def require_resumable(config: RunConfig, paths: RunPaths) -> list[str]:
    """Refuse, as `require_continuable`, settings that cannot follow those of the last start (the folder's run.json).

    Returns the changes since that start, in words.

    Training would refuse the same, on machines that are paid for.
    """
    store = open_storage(paths.run_uri)
    if store.stat(RUN_FILE) is None:
        return []
    # With the addresses of then: of a run that was moved, training compares those of weights with its checkpoints'.
    try:
        changed = changed_settings(earlier_run_file(store, as_written=True), config)
    except ConfigError:
        changed = ChangedSettings({"": []})  # another version's: training compares what it has saved
    require_continuable(paths.run_id, changed, {"": store}, config)
    return changed.texts()
