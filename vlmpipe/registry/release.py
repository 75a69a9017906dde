"""Registers an evaluated run: reads its files, asks the gate and the registry, writes the decision.

The steps `decide` and `register_model` call this; nothing here needs KFP.
"""

from __future__ import annotations

import contextlib
import itertools

from vlmpipe.config.run_settings import RunSettings, run_sha256
from vlmpipe.records.decision import Champion, Decision
from vlmpipe.records.registered import Registered
from vlmpipe.registry.folder import Candidate, Entry, FolderRegistry, MadeContainers, OvertakenError, Registry
from vlmpipe.registry.gate import AgainstChampion, decide
from vlmpipe.registry.model_card import model_card
from vlmpipe.registry.recorded_answers import recorded_answers
from vlmpipe.trainer.checkpoint.resume_rules import as_trained
from vlmpipe.trainer.config.job import run_uri_of
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, print_warning
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.evaluation.validation.champion_pointer import CHAMPION_FILE, ChampionPointer
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.export_manifest import NAME as EXPORT
from vlmpipe.trainer.storage.export_manifest import quantized_folder, require_whole_export
from vlmpipe.trainer.storage.records import read_record, write_record

MAX_RACES = 10  # with other runs, for the champion's place


def decide_run(run_uri: str) -> Decision:
    """Ask the gate about an evaluated run and write `decision.json`.

    Raises ConfigError when the run was not evaluated.
    """
    store = open_storage(run_uri)
    settings = RunSettings.require(store)
    evaluation, summary = Evaluation.require(store), Summary.read_if_there(store) or Summary()
    registry, model, _ = open_registry(settings)
    entry = registry.champion(model)
    decision = decide(
        evaluation, settings.gate, _against(entry, settings, evaluation, summary, store) if entry else None
    )
    decision = decision.model_copy(update={"run_sha256": run_sha256(store)})
    decision.write(store)
    return decision


def _against(
    entry: Entry, settings: RunSettings, evaluation: Evaluation, summary: Summary, store: Storage
) -> AgainstChampion:
    """The model in use beside this run's: its answers in this evaluation, else those that its run has recorded."""
    champion, asked = entry.as_champion(), evaluation.champion
    if entry.run_id == settings.run.run_id:
        obstacle = "it is an earlier checkpoint of this run, whose recorded answers are replaced"
        is_this_run = entry.checkpoint == _exported(store, summary)
        return AgainstChampion(champion, obstacle=obstacle, is_this_run=is_this_run)
    if asked and (asked.version, asked.run_id) == (entry.version, entry.run_id):
        if asked.obstacle:
            return AgainstChampion(champion, obstacle=asked.obstacle)
        left_out = asked.in_its_training
        where = f" (without {left_out:,} questions of its training data)" if left_out else ""
        return AgainstChampion(champion, PairedCounts.model_validate(asked.paired), where=where)
    try:
        paired = recorded_answers(store, open_storage(run_uri_of(settings.run.root_uri, entry.run_id, "")))
    except UserError as error:
        if error.code == ExitCode.UNAVAILABLE:
            raise
        return AgainstChampion(champion, obstacle=f"which images its questions share is not known: {error.found}")
    if paired is None:
        obstacle = "this evaluation did not ask it, and its run has left no answers to at least half of its questions"
        return AgainstChampion(champion, obstacle=obstacle)
    return AgainstChampion(champion, paired, where=", by the answers that its run has recorded,")


def _exported(store: Storage, summary: Summary) -> str:
    """Name of the exported checkpoint, which is not the newest one with checkpoint.export best or where that is
    damaged.
    """
    described = read_record(store, EXPORT) if store.stat(EXPORT) else {}
    return str(described.get("checkpoint", summary.checkpoint))


def point_to_champion(run_uri: str) -> None:
    """Write `champion.json`, the model in use that the evaluation is to ask too; remove it where there is none."""
    store = open_storage(run_uri)
    settings = RunSettings.require(store)
    registry, model, _ = open_registry(settings)
    entry = registry.champion(model)
    run_id, gate = settings.run.run_id, settings.gate
    if entry is None or entry.run_id == run_id or gate.bounds == "none" or gate.max_regression is None:
        store.delete(CHAMPION_FILE)
        return
    pointer = ChampionPointer(
        version=entry.version,
        run_id=entry.run_id,
        run_uri=run_uri_of(settings.run.root_uri, entry.run_id, ""),
        checkpoint=entry.checkpoint,
    )
    write_record(store, CHAMPION_FILE, pointer.model_dump())


def was_accepted(run_uri: str) -> bool:
    """Return whether the gate has accepted a run with the very settings that it has now, and its export is still
    whole.
    """
    store = open_storage(run_uri)
    settings = RunSettings.require(store)
    decision = None if settings.train.resume == "never" else Decision.read_if_there(store)
    if decision is None or not decision.accepted or decision.run_sha256 != run_sha256(store):
        return False
    with contextlib.suppress(DataError):
        require_whole_export(store)
        return True
    return False


def register_run(run_uri: str) -> Entry:
    """Register an accepted run's export, make it the champion and write `registered.json`. Safe to repeat.

    Where another run became champion since the decision, the gate decides again, beside that one.

    Raises ConfigError for a run that was not accepted, DataError for a damaged export, UserError (exit 76) for a run
    that is rejected beside a newer champion, OvertakenError where that changes again and again.
    """
    store = open_storage(run_uri)
    settings = RunSettings.require(store)
    decision = Decision.require(store)
    if not decision.accepted:
        raise ConfigError(
            f"run {settings.run.run_id} was not accepted. {decision.reason}",
            expected="an accepted run",
            fix="train further or change the gate's thresholds, then run the pipeline again",
        )
    evaluation, summary = Evaluation.require(store), Summary.require(store)
    pointers = DataPointers.require(store)
    require_whole_export(store)
    checkpoint = _exported(store, summary)
    registry, model, alias = open_registry(settings)
    config = settings.job()
    base = config.model.pretrained if config.model.exports_adapter else None
    candidate = Candidate(
        run_id=settings.run.run_id,
        export_uri=join_uri(run_uri, "export"),
        checkpoint=checkpoint,
        metrics=evaluation.as_json(),
        data_fingerprint=pointers.prepared_uri.rstrip("/").rpartition("/")[2],
        config_digest=run_sha256(store),
        base=base.origin(config.model.seed) if base else "",
        quantized=_quantized(store, evaluation),
    )
    trained = config if summary.settings is None else as_trained(config, summary.settings)
    card = model_card(trained, evaluation, summary, model=model, checkpoint=checkpoint)
    champion = registry.champion(model)
    is_itself = champion and (champion.run_id, champion.checkpoint) == (candidate.run_id, candidate.checkpoint)
    if _version(champion) != _version(decision.champion) and not is_itself:
        decision = _decided_again(run_uri)  # before files are copied
    entry = registry.register(model, candidate, card)
    if late := sorted(candidate.quantized.keys() - entry.quantized.keys()):
        print_warning(
            f"version {entry.version} of {model} was registered without its {' and '.join(late)} export, and stays so: "
            f"the run's folder has it",
            step="register-model",
        )
    for races in itertools.count(1):
        try:
            registry.promote(model, entry.version, instead_of=_version(decision.champion))
            break
        except OvertakenError:
            if races == MAX_RACES:
                raise
            decision = _decided_again(run_uri)
    resource = {"resource": entry.resource} if entry.resource else {}
    registered = Registered(model=model, version=entry.version, uri=entry.model_uri, alias=alias, **resource)
    if entry.quantized:
        registered = registered.model_copy(update={"quantized": entry.quantized})
    registered.write(store)
    return entry


def _quantized(run: Storage, evaluation: Evaluation) -> dict[str, str]:
    """Addresses of the quantized exports that answer as the export does. Raises DataError for a damaged one."""
    folders = {form: quantized_folder(form) for form, scores in evaluation.quantized.items() if scores.accepted}
    for folder in folders.values():
        require_whole_export(run, folder)
    return {form: run.uri(folder) for form, folder in folders.items()}


def require_container(settings: RunSettings, registered: Registered) -> None:
    """Raise ConfigError where an endpoint of Vertex AI would serve another export than deploy.quantized names.

    A version's container there stays as it was made when the version was registered.
    """
    deploy, registry = settings.deploy, open_registry(settings)[0]
    if deploy is None or deploy.cloud_run or settings.register_.serving or not isinstance(registry, MadeContainers):
        return
    if registered.served_uri(deploy.quantized) not in registry.arguments(registered.version):
        raise ConfigError(
            f"version {registered.version} of {registered.model} was registered to serve another export than "
            f"deploy.quantized says, {deploy.quantized or 'null'}",
            expected="a version that was registered with this run file: its container stays as it was made",
            fix="set deploy.quantized as it was then, or deploy another checkpoint of the run",
        )


def _decided_again(run_uri: str) -> Decision:
    """Decide again, compared with the champion of now. Raises UserError if the gate rejects."""
    decision = decide_run(run_uri)
    print(f"another run became champion since the decision; compared with it: {decision.reason}", flush=True)
    if not decision.accepted:
        raise UserError(
            f"another run became champion since the decision, and compared with it: {decision.reason}",
            expected="a model that the gate accepts, compared with the champion",
            fix="train further or change the gate's thresholds, then run the pipeline again",
            code=ExitCode.REJECTED,
        )
    return decision


def _version(model: Entry | Champion | None) -> int | None:
    return model.version if model else None


def open_registry(settings: RunSettings) -> tuple[Registry, str, str]:
    """The registry of a run, the model's name in it and the alias that moves to an accepted version."""
    register = settings.register_
    root_uri = join_uri(settings.run.root_uri, "registry")
    model, alias, place = settings.model_name, register.alias, register.registry
    if place.startswith("vertex://"):
        from vlmpipe.registry.vertex import VertexRegistry

        return VertexRegistry.of(settings, root_uri), model, alias
    return FolderRegistry(place or root_uri, alias=alias), model, alias
