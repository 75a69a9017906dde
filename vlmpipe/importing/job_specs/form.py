"""Mends the form of a job spec: unknown fields, spellings, and values of another type."""

from __future__ import annotations

import re

from vlmpipe.config.other_names import word_of_guides
from vlmpipe.importing.findings import Outcome, Path, path_text
from vlmpipe.importing.job_specs.draft import Draft, SpecDraft
from vlmpipe.importing.settings.concepts import is_on
from vlmpipe.job_spec.read_forms import TASKS, ReadTask
from vlmpipe.job_spec.schema import UnknownField, load_fields, read_field, snake_case
from vlmpipe.job_spec.violation import Violation
from vlmpipe.job_spec.worker_pools import POOLS

SPOT_WORDS = ("use_spot", "spot", "is_spot", "spot_vm", "use_spot_vms", "preemptible", "use_preemptible",
              "provisioning_model")  # fmt: skip
OF_THE_JOB = ("network", "reserved_ip_ranges", "psc_interface_config", "service_account", "tensorboard",
              "enable_web_access", "enable_dashboard_access", "base_output_directory",
              "persistent_resource_id")  # fmt: skip
OF_SCHEDULING = ("timeout", "strategy", "restart_job_on_worker_restart", "disable_retries", "max_wait_duration")
OF_PACKAGES = ("python_module", "package_uris", "executor_image_uri")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400, "": 1}
_DURATION = re.compile(r"(\d{1,7}(?:\.\d+)?)\s*(s|m|min|h|hr|d|)(?:ours?|inutes?|ays?|econds?)?")


def mend_form(draft: SpecDraft) -> None:
    """Answer every value that the API would not read as it stands."""
    for target, written in draft.lenient.moved.items():
        leaves = draft.leaves_at(written)
        draft.put(target, draft.get(target), f"{path_text(written)} there; it belongs here", leaves=leaves)
    for field in draft.reading.unknown:
        if field.path not in draft.lenient.moved.values():
            _unknown(draft, field)
    for violation in draft.lenient.violations:
        if violation.code != "VP101":
            _form(draft, violation)
    _nameless_variables(draft)


def _nameless_variables(draft: SpecDraft) -> None:
    """Take out entries that are no variables with names: an unreadable one leaves an empty entry."""
    for index, pool in enumerate(draft.pools):
        for kind in TASKS:
            variables = pool.get(kind, ReadTask()).get("env", [])
            for number in reversed(range(len(variables))):
                if not variables[number].get("name"):
                    path = pools_path(index, kind, "env", number)
                    draft.remove(path, Outcome.REFUSED, "a variable without a name")


def _unknown(draft: SpecDraft, field: UnknownField) -> None:
    name, leaves = snake_case(str(field.path[-1])), draft.leaves_at(field.path)
    if name in SPOT_WORDS:
        _spot(draft, field, leaves)
    elif name in OF_THE_JOB and len(field.path) > 1:
        _hoist(draft, field, (name,), "one for the whole job, which stands next to the pools")
    elif name in OF_SCHEDULING:
        _hoist(draft, field, ("scheduling", name), "one for the whole job, in scheduling")
    elif name in OF_PACKAGES and len(field.path) == 3:
        _hoist(draft, field, (*field.path[:2], "python_package_spec", name), "it belongs into python_package_spec")
    else:
        violation = next((v for v in draft.reading.violations if v.field == field.path), None)
        near = violation.expected.partition("; ")[2] if violation else ""
        unknown = "; ".join(filter(None, ["the API has no such field", near]))
        text = word_of_guides(name) or (violation.fix if violation else "") or unknown
        outcome = Outcome.DROPPED if violation and violation.fix.startswith("leave it out") else Outcome.REFUSED
        for leaf in leaves:
            draft.ledger.note(leaf, outcome, "", text)
            draft.at.pop(leaf, None)


def _spot(draft: SpecDraft, field: UnknownField, leaves: list[Path]) -> None:
    asks = is_on(field.value) and str(field.value).upper() != "STANDARD"
    strategy = draft.get(("scheduling", "strategy"))
    if asks and strategy in (None, "STANDARD", "SPOT"):
        reason = f"{field.path[-1]} there; the whole job is on Spot or none of it"
        draft.put(("scheduling", "strategy"), "SPOT", reason, leaves=leaves)
        return
    for leaf in leaves:
        reason = f"scheduling.strategy {strategy} decides it" if asks else "the machines are not on Spot by default"
        draft.ledger.note(leaf, Outcome.DROPPED, "", reason)
        draft.at.pop(leaf, None)


def _hoist(draft: SpecDraft, field: UnknownField, target: Path, reason: str) -> None:
    """Move a value to where the API has it, if it fits there."""
    leaves = draft.leaves_at(field.path)
    value, violations = read_field(field.value, _type_of(target), field.path, draft.file.spelling)
    if value is None and violations and violations[0].code == "VP108":
        value = _duration(field.value)
    present = draft.get(target)
    if value is not None and present in (None, value):
        draft.put(target, value, f"{path_text(field.path)} there; {reason}", leaves=leaves)
        return
    why = f"{path_text(target)} is {present} already" if present is not None else violations[0].expected
    for leaf in leaves:
        draft.ledger.note(leaf, Outcome.REFUSED, "", why)
        draft.at.pop(leaf, None)


def _type_of(path: Path) -> str:
    """The API's type of a field."""
    kind = "CustomJobSpec"
    for part in path:
        kind = kind.strip("[]") if isinstance(part, int) else load_fields()["messages"][kind][part]
    return kind


def _form(draft: SpecDraft, violation: Violation) -> None:
    path, value = violation.field, draft.get(violation.field)
    leaves = draft.leaves_at(path)
    if violation.code == "VP109":
        return
    if value not in (None, {}, ""):
        if violation.code != "VP102":
            draft.put(path, value, f"found {violation.found}, expected {violation.expected}")
        else:
            for leaf in leaves:
                if draft.at[leaf] == path:
                    draft.ledger.note(leaf, Outcome.CHANGED, path_text(path), f"spelled {violation.expected}")
        return
    written = draft.ledger.values[leaves[0]] if len(leaves) == 1 else None
    if isinstance(written, list) and isinstance(path[-1], int) and path[-1] < len(written):
        written = written[path[-1]]  # a word of a command
    mended = _mended(violation.code, written, path)
    if mended is not None:
        draft.put(path, mended, f"{written} there; expected {violation.expected}")
        return
    for leaf in leaves:
        draft.ledger.note(leaf, Outcome.REFUSED, "", f"found {violation.found}, expected {violation.expected}")
        draft.at.pop(leaf, None)


def _mended(code: str, written: object, path: Path) -> object:
    """The value that was meant; None where it is not known."""
    if code == "VP108":
        return _duration(written)
    if code == "VP106" and isinstance(written, str):
        names = load_fields()["enums"].get(_type_of(path), [])
        return enum_value(written, names)
    if code == "VP103" and isinstance(written, int | float) and _type_of(path) == "text":
        return str(written)
    if code == "VP103" and isinstance(written, str) and _type_of(path) == "[text]":
        return [written]
    word = written.lower() if isinstance(written, str) else ""
    if code == "VP103" and word in ("true", "false", "yes", "no") and _type_of(path) == "bool":
        return word in ("true", "yes")
    return None


def _duration(written: object) -> str | None:
    match = _DURATION.fullmatch(str(written).strip().lower())
    return f"{round(float(match[1]) * _UNITS[match[2]])}s" if match else None


def enum_value(written: str, names: list[str]) -> str | None:
    """A name of the API that is written in another way, such as nvidia-tesla-a100 or A100."""
    text = re.sub(r"[^A-Z0-9]+", "_", written.upper()).strip("_")
    if text in names:
        return text
    ending = [name for name in names if name.endswith(f"_{text}")]
    return ending[0] if len(ending) == 1 else None


def pools_path(index: int, *names: str | int) -> Path:
    return (POOLS, index, *names)


def cut_word(draft: Draft, path: Path, reason: str) -> None:
    """Take a word out of a command, and the option before it whose value it is."""
    *parents, index = path
    words = draft.get(tuple(parents))
    assert isinstance(index, int)
    before = words[index - 1] if index else ""
    is_value = before.startswith("-") and "=" not in before and not words[index].startswith("-")
    gone = {index, index - 1} if is_value else {index}
    draft.put(tuple(parents), [word for number, word in enumerate(words) if number not in gone], reason)
