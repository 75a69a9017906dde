"""Job specs: corrected as job specs, or as the machines, network and program of a run file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.importing.cluster import assume_no_torch_build, assume_strategy
from vlmpipe.importing.findings import Ledger, Outcome, Path, path_text
from vlmpipe.importing.job_specs.answers import NO_FIELD, Answers
from vlmpipe.importing.job_specs.draft import Draft, SpecDraft, StudyDraft
from vlmpipe.importing.job_specs.repairs import repair
from vlmpipe.importing.job_specs.search import translate_search
from vlmpipe.importing.job_specs.study_repairs import repair_study
from vlmpipe.importing.launch_command import Launch
from vlmpipe.importing.program import (
    OF_A_SEARCH,
    command_content,
    has_own_program,
    program_defaults,
    translate_command,
)
from vlmpipe.importing.settings.model_words import run_name
from vlmpipe.importing.translation import Setting, Translation
from vlmpipe.importing.yaml_text import yaml_lines
from vlmpipe.job_spec.file import SpecFile, spec_of
from vlmpipe.job_spec.read_forms import TASKS, ReadTask, TaskKind
from vlmpipe.job_spec.rules.base import Pool
from vlmpipe.job_spec.schema import camel_case, snake_case
from vlmpipe.job_spec.study import CHECKED
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, EVALUATOR_POOL, POOLS, REDUCTION_SERVER_POOL, WORKER_POOL
from vlmpipe.trainer.errors import ConfigError

# Fields of the spec -> of a run file.
OF_THE_JOB = {
    ("network",): "gcp.network",
    ("reserved_ip_ranges",): "gcp.reserved_ip_ranges",
    ("service_account",): "gcp.job_service_account",
    ("tensorboard",): "gcp.tensorboard",
    ("persistent_resource_id",): "gcp.persistent_resource_id",
    ("enable_web_access",): "gcp.enable_web_access",
    ("enable_dashboard_access",): "gcp.enable_dashboard_access",
    ("psc_interface_config",): "gcp.psc_interface_config",
    ("experiment",): "gcp.experiment",
    ("scheduling", "timeout"): "cluster.timeout",
    ("scheduling", "restart_job_on_worker_restart"): "cluster.restart_job_on_worker_restart",
    ("scheduling", "disable_retries"): "cluster.disable_retries",
    ("scheduling", "max_wait_duration"): "cluster.max_wait_duration",
}
OF_A_NODE = {
    ("machine_spec", "machine_type"): "cluster.machine_type",
    ("machine_spec", "accelerator_type"): "cluster.accelerator_type",
    ("machine_spec", "accelerator_count"): "cluster.accelerator_count",
    ("disk_spec", "boot_disk_type"): "cluster.boot_disk_type",
    ("disk_spec", "boot_disk_size_gb"): "cluster.boot_disk_size_gb",
    ("nfs_mounts",): "cluster.nfs_mounts",
    ("lustre_mounts",): "cluster.lustre_mounts",
}
OF_THE_REQUEST = {  # fields around the spec
    "display_name": "the name of the run",
    "name": "the service makes it",
    "state": "the service makes it",
    "create_time": "the service makes it",
    "start_time": "the service makes it",
    "end_time": "the service makes it",
    "update_time": "the service makes it",
    "error": "the service makes it",
    "web_access_uris": "the service makes it",
}

# Names of gradient accumulation in the table of programs' words, with its number.
ACCUMULATION = re.compile(r"(?:^|\s)--?(?:gradient|grad)[-_]accum(?:ulation)?(?:[-_]steps)?[= ](\d{1,6})(?=\s|$)")


def corrected_spec(content: Mapping[str, object] | list[object], ledger: Ledger) -> list[str]:
    """Lines of the corrected spec, in the file's form and spelling. The ledger gets the findings."""
    file = spec_of(content)
    draft = SpecDraft(file, ledger)
    repair(draft, load_catalog(), file.region)
    study = StudyDraft(file, ledger) if file.is_of_a_search else None
    if study:
        repair_study(study, draft)
    for leaf in ledger.unanswered():
        ledger.note(leaf, Outcome.EXPRESSED, path_text(leaf))
    return _spec_lines(draft, study, content)


def _spec_lines(draft: SpecDraft, study: StudyDraft | None, content: Mapping[str, object] | list[object]) -> list[str]:
    is_camel = draft.file.spelling == "camelCase"
    spec, comments = _spelled(draft, is_camel)
    if draft.file.form != "job" or isinstance(content, list):
        return yaml_lines(spec, comments, blank_lines=False)
    comments = {(draft.file.root, *path): text for path, text in comments.items()}
    around = {key: value for key, value in content.items() if key != draft.file.root}
    if study:
        mended, remarks = _spelled(study, is_camel)
        around = {key: value for key, value in around.items() if snake_case(str(key)) not in CHECKED} | mended
        comments |= remarks
    return yaml_lines({**around, draft.file.root: spec}, comments, blank_lines=False)


def _spelled(draft: Draft, is_camel: bool) -> tuple[dict[str, object], dict[Path, str]]:
    """A message and its comments in the file's spelling."""
    present = {name: value for name, value in draft.spec.items() if value not in ({}, [])}
    spelled = {camel_case(name) if is_camel else name: _spell(value, is_camel) for name, value in present.items()}
    return spelled, {_spell_path(path, is_camel): text for path, text in draft.comments.items()}


def _spell(value: object, camel: bool) -> object:
    if isinstance(value, Mapping):
        return {camel_case(key) if camel else key: _spell(inner, camel) for key, inner in value.items()}
    return [_spell(inner, camel) for inner in value] if isinstance(value, list) else value


def _spell_path(path: Path, camel: bool) -> Path:
    return tuple(camel_case(part) if camel and isinstance(part, str) else part for part in path)


def translate_job_spec(translation: Translation, content: Mapping[str, object] | list[object]) -> None:
    """Fields of a run file for the machines, the network and the program of a job spec."""
    file = spec_of(content)
    draft = SpecDraft(file, translation.ledger)
    repair(draft, load_catalog(), file.region)
    answers = Answers(translation, draft)
    _job_fields(answers)
    _around(translation, file, content)
    _nodes(answers)
    is_search = file.is_of_a_search and _search(translation, file, draft)
    _other_pools(answers)
    _environment(answers)
    _program(answers, is_search=is_search)
    if "train.trainer.name" not in translation.settings:
        for field in [name for name in translation.settings if name.startswith("train.trainer.")]:
            del translation.settings[field]
            translation.ledger.refuse_field(field, "roles are those of a program of your own, and no command is given")
    answers.rest()


def _search(translation: Translation, file: SpecFile, trial: SpecDraft) -> bool:
    """The study as the section tune. Returns whether there is one."""
    study = StudyDraft(file, translation.ledger)
    try:
        repair_study(study, trial)
    except ConfigError as error:
        for leaf in study.at:
            translation.refuse(leaf, error.found)
        return False
    return translate_search(translation, Answers(translation, study), _passes(trial))


def _passes(trial: SpecDraft) -> int:
    """Passes of a step, where words of pool 0 say their number."""
    for kind in ("container_spec", "python_package_spec"):
        words = [str(word) for name in ("command", "args") for word in trial.get((POOLS, CHIEF_POOL, kind, name)) or ()]
        if match := ACCUMULATION.search(" ".join(words)):
            return max(1, int(match[1]))
    return 1


def _job_fields(answers: Answers[SpecDraft]) -> None:
    for path, field in OF_THE_JOB.items():
        if answers.draft.get(path) is not None:
            answers.take(path, field)
    strategy = answers.draft.get(("scheduling", "strategy"))
    if strategy is not None:
        name = str(strategy).lower()
        if name in ("standard", "spot", "flex_start"):
            answers.take(("scheduling", "strategy"), "cluster.scheduling_strategy", name)
    if place := answers.draft.get(("base_output_directory", "output_uri_prefix")):
        path = ("base_output_directory", "output_uri_prefix")
        answers.take(path, "output.root_uri", str(place).rstrip("/"), "runs get folders of their own below it")
    for name in ("experiment_run", "protected_artifact_location_id", "models"):
        answers.refuse((name,), NO_FIELD)


def _around(translation: Translation, file: SpecFile, content: object) -> None:
    """Fields of the job around its spec."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        name, path = snake_case(str(key)), (str(key),)
        if key == file.root or (file.form != "job" and name not in ("display_name", "labels")):
            continue
        if name == "display_name" and isinstance(value, str):
            cleaned = run_name(value)
            translation.express(path, "name") if cleaned == value else translation.change(
                [path], "name", cleaned, f"{value} there; lower case, digits and dashes"
            )
        elif name == "labels" and isinstance(value, Mapping):
            translation.express(path, "gcp.labels", {str(label): str(text) for label, text in value.items()})
        elif name == "encryption_spec" and isinstance(value, Mapping) and len(value) == 1:
            translation.express(path, "gcp.encryption_spec_key_name", next(iter(value.values())))
        elif name in OF_THE_REQUEST:
            translation.drop(path, OF_THE_REQUEST[name])
        elif not (file.is_of_a_search and name in CHECKED):
            translation.refuse(path, NO_FIELD)


def _nodes(answers: Answers[SpecDraft]) -> None:
    """Pools 0 and 1: machines that train."""
    draft = answers.draft
    worker = draft.pools[WORKER_POOL] if len(draft.pools) > WORKER_POOL else {}
    for part, field in OF_A_NODE.items():
        path: Path = (POOLS, CHIEF_POOL, *part)
        if (value := draft.get(path)) is None:
            continue
        answers.take(path, field, value)
        other: Path = (POOLS, WORKER_POOL, *part)
        if draft.get(other) == value:
            answers.note(other, None, field, "")
        elif worker:
            answers.refuse(other, f"all nodes have one machine: {field} is that of pool 0")
    affinity = (POOLS, CHIEF_POOL, "machine_spec", "reservation_affinity")
    if value := draft.get(affinity):
        fields = dict(value)
        fields["reservation_affinity_type"] = str(fields.get("reservation_affinity_type", "")).lower()
        answers.take(affinity, "cluster.reservation_affinity", fields, "the type in lower case")
        answers.note((POOLS, WORKER_POOL, *affinity[2:]), None, "cluster.reservation_affinity", "")
    count = 1 + int(worker.get("replica_count") or 0)
    path = (POOLS, WORKER_POOL if worker else CHIEF_POOL, "replica_count")
    answers.take(path, "cluster.replica_count", count, "the chief and the workers" if worker else "")
    answers.note((POOLS, CHIEF_POOL, "replica_count"), None, "cluster.replica_count", "")


def _other_pools(answers: Answers[SpecDraft]) -> None:
    """Pools 2 and 3: reducers, parameter servers and evaluators."""
    draft = answers.draft
    for index in (REDUCTION_SERVER_POOL, EVALUATOR_POOL):
        if index >= len(draft.pools):
            return
        pool, path = draft.pools[index], (POOLS, index)
        if Pool(index, pool).is_reducers:
            answers.take((*path, "replica_count"), "cluster.reduction_server.replica_count")
            answers.take((*path, "machine_spec", "machine_type"), "cluster.reduction_server.machine_type")
            answers.take((*path, "container_spec", "image_uri"), "cluster.reduction_server.container_uri")
            answers.drop((*path, "disk_spec"), "reducers store nothing")
            continue
        role = "ps" if index == REDUCTION_SERVER_POOL else "evaluator"
        answers.take((*path, "replica_count"), f"train.trainer.roles.{role}")
        if role == "ps" and draft.get((*path, "machine_spec", "machine_type")):
            answers.take((*path, "machine_spec", "machine_type"), "train.trainer.roles.ps_machine_type")
        answers.refuse(path, "replicas of this role run the command of pool 0, on machines without GPUs")


def _environment(answers: Answers[SpecDraft]) -> None:
    """Variables of pool 0 for every job; those of other pools where they are the same."""
    draft, variables = answers.draft, dict[str, str]()
    for kind in TASKS:
        for index, pool in enumerate(draft.pools):
            for number, variable in enumerate(pool.get(kind, ReadTask()).get("env", ())):
                path, name, value = (
                    (POOLS, index, kind, "env", number),
                    variable.get("name", ""),
                    variable.get("value", ""),
                )
                known = variables.get(name)
                if index == CHIEF_POOL or known == value:
                    variables[name] = value
                    answers.note(path, None, "cluster.env", "")
                elif known is None and index == WORKER_POOL:
                    variables[name] = value
                    answers.note(path, Outcome.CHANGED, "cluster.env", "variables are those of every node")
                else:
                    answers.refuse(path, "variables are those of every node: the chief's value was taken")
    if variables:
        answers.translation.settings["cluster.env"] = Setting(variables, "", is_given=True)


def _program(answers: Answers[SpecDraft], *, is_search: bool) -> None:
    """The container of pool 0: its image, and its command as a program of one's own or as settings.

    is_search: trials are vlmpipe's trainer, which takes the arguments of the program.
    """
    draft, translation = answers.draft, answers.translation
    package = draft.pools[CHIEF_POOL].get("python_package_spec")
    kind: TaskKind = "python_package_spec" if package else "container_spec"
    task: ReadTask = draft.pools[CHIEF_POOL][kind]
    place = (POOLS, CHIEF_POOL, kind)
    words = [*task.get("command", ()), *task.get("args", ())]
    if package and is_search:
        for name in ("package_uris", "executor_image_uri", "python_module"):
            answers.refuse((*place, name), OF_A_SEARCH)
    elif package:
        _package(answers, place)
        assume_no_torch_build(translation)
    else:
        _image(answers, (*place, "image_uri"), has_program=has_own_program(words) and not is_search)
    names = [(POOLS, index, kind, name) for index in (CHIEF_POOL, WORKER_POOL) for name in ("command", "args")]
    placed = [(path[1], leaf) for path in names for leaf in draft.leaves_at(path) if draft.at[leaf] == path]
    leaves = [leaf for index, leaf in placed if index == placed[0][0]]  # a chief that was split off has none of its own
    _same_in_other_pools(answers, kind)
    if package and not is_search:
        return
    if not words or not leaves:
        why = "the file has no command: vlmpipe's trainer; train.trainer.command runs a program of your own"
        assume_strategy(translation, f"{why}; an example that fits most models")
        translate_command(translation, Launch())
        return
    first, *others = leaves
    launch, content = command_content(words, translation.files, takes_settings=is_search)
    translation.ledger.replace(first, content)
    for leaf in (first, *others):
        draft.at.pop(leaf, None)
    for leaf in others:
        field = "train" if is_search else "train.trainer.command"
        translation.ledger.note(leaf, Outcome.CHANGED, field, "joined to the command")
    translate_command(translation, launch, first)


def _image(answers: Answers[SpecDraft], path: Path, *, has_program: bool) -> None:
    """The image of a program of one's own; vlmpipe's trainer has another one."""
    if has_program:
        answers.take(path, "cluster.image_uri")
        assume_no_torch_build(answers.translation)
    else:
        reason = "vlmpipe's trainer has an image of its own (make build); the entry point of this one is not known here"
        answers.drop(path, f"{reason}; train.trainer.command and image_uri run it")


def _package(answers: Answers[SpecDraft], place: Path) -> None:
    """A Python package and its module."""
    task = answers.draft.get(place)
    answers.translation.settings["train.trainer.kind"] = Setting("package", "", is_given=True)
    for name in ("package_uris", "executor_image_uri", "python_module"):
        answers.take((*place, name), f"train.trainer.{name}")
    if task.get("args"):
        answers.take((*place, "args"), "train.trainer.command")
    module = str(task.get("python_module", "")).rpartition(".")[2].lower().replace("_", "-") or "package"
    answers.translation.settings["train.trainer.name"] = Setting(module, "", is_given=False)
    program_defaults(answers.translation)


def _same_in_other_pools(answers: Answers[SpecDraft], kind: TaskKind) -> None:
    """Containers of workers and of other roles: they run what pool 0 runs."""
    draft = answers.draft
    chief: ReadTask = draft.pools[CHIEF_POOL][kind]
    for index in range(1, len(draft.pools)):
        for name in ("image_uri", "command", "args", "executor_image_uri", "package_uris", "python_module"):
            path = (POOLS, index, kind, name)
            value = draft.get(path)
            field = "cluster.image_uri" if name == "image_uri" else "train.trainer.command"
            if name == "image_uri" and value == chief.get(name) and field not in answers.translation.settings:
                answers.drop(path, "as that of pool 0")
            elif value is not None and value == chief.get(name):
                answers.note(path, None, field, "")
            elif value is not None:
                answers.refuse(path, f"all nodes run one {name.partition('_')[0]}: that of pool 0")
