"""Mends violations of the job spec rules, one by one, until `check` finds no error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping

from vlmpipe.catalog.machines import Catalog
from vlmpipe.importing.findings import Outcome, Path
from vlmpipe.importing.job_specs.draft import SpecDraft
from vlmpipe.importing.job_specs.form import cut_word, mend_form, pools_path
from vlmpipe.importing.job_specs.launch_numbers import with_right_number
from vlmpipe.job_spec.read_forms import ReadContainer, ReadMachine, ReadPackage, ReadPool
from vlmpipe.job_spec.rules import CHECKS
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.rules.machines import BOOT_DISK_TYPES, MAX_BOOT_DISK_GB, MIN_BOOT_DISK_GB
from vlmpipe.job_spec.rules.worker_pools import REDUCER_MACHINES
from vlmpipe.job_spec.violation import RULES, Violation
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, EVALUATOR_POOL, POOLS, REDUCTION_SERVER_POOL, WORKER_POOL
from vlmpipe.trainer.errors import ConfigError

MAX_REPAIRS = 400
EXAMPLE_IMAGE = f"us-central1-docker.pkg.dev/example-project/training/trainer@sha256:{'0' * 63}1"
EXAMPLE_RESERVATION = "projects/example-project/zones/us-central1-a/reservations/example"
EXAMPLE_GPU = "NVIDIA_TESLA_T4"
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
# Warnings that are mended too; others become comments.
MENDED_WARNINGS = ("VP107", "VP215", "VP405", "VP406", "VP407", "VP409", "VP706", "VP707", "VP708", "VP709")
SECRET = "a secret is not copied: name it in Secret Manager, in the run file's section secrets; the program reads it"


def repair(draft: SpecDraft, catalog: Catalog, region: str) -> None:
    """Mend the form, then every violation that is an error or in MENDED_WARNINGS; the rest become comments.

    Raises ConfigError for a spec without a pool, or one that cannot be mended.
    """
    mend_form(draft)
    if not any(draft.pools):
        raise ConfigError("the job spec has no worker pool", expected="at least pool 0, the chief")
    for _ in range(MAX_REPAIRS):
        violations = _violations(draft, catalog, region)
        if number := next((violation for violation in violations if with_right_number(draft, violation)), None):
            path, words = with_right_number(draft, number) or ((), [])
            draft.put(path, words, f"{number.code}: {number.sentence}")
            continue
        chosen = next((violation for violation in violations if _is_mended(violation)), None)
        if chosen is None:
            for violation in violations:
                draft.comment(violation.field or (POOLS,), f"{violation.code}: {violation.sentence}")
            return
        mend = REPAIRS.get(chosen.code, _take_out)
        before = copy.deepcopy(draft.spec)
        mend(draft, chosen, catalog)
        if draft.spec == before and not _take_out_around(draft, chosen):
            raise ConfigError(
                f"the job spec cannot be mended: {chosen.code} {chosen.sentence}", expected=chosen.expected
            )
    raise ConfigError("the job spec cannot be mended", expected="a spec with fewer mistakes")


def _violations(draft: SpecDraft, catalog: Catalog, region: str) -> list[Violation]:
    job = Job(draft.typed, frozenset(), region, catalog, {})
    return [violation for check in CHECKS for violation in check(job)]


def _is_mended(violation: Violation) -> bool:
    return RULES[violation.code].severity == "error" or violation.code in MENDED_WARNINGS


def _take_out(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(violation.field, Outcome.REFUSED, violation.sentence)


def _take_out_around(draft: SpecDraft, violation: Violation) -> bool:
    """Take out the smallest section around a violation; never a pool."""
    path = violation.field
    while len(path) > 1 and not (path[0] == POOLS and len(path) <= 3):
        path = path[:-1]
        if draft.remove(path, Outcome.REFUSED, violation.sentence):
            return True
    return False


def _drop(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(violation.field, Outcome.DROPPED, violation.sentence)


def _secret(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(violation.field, Outcome.REFUSED, SECRET)


def _secret_word(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    cut_word(draft, violation.field, SECRET)


def _trial_word(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    cut_word(draft, violation.field, violation.sentence)


def _chief(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    """Leave one replica in pool 0; the others are workers, or servers in pool 2."""
    pools = draft.pools
    chief, count = pools[CHIEF_POOL], pools[CHIEF_POOL].get("replica_count") or 0
    if count < 1:
        draft.put(pools_path(0, "replica_count"), 1, "pool 0 is the chief, one replica")
        return
    if str(REDUCTION_SERVER_POOL) in violation.fix and len(pools) > 1:
        _servers(draft, chief)
        return
    worker = pools[WORKER_POOL] if len(pools) > 1 else None
    reason = f"{count} replicas there: pool 0 is the chief alone, and the other {count - 1} are workers in pool 1"
    leaves = draft.leaves_at(pools_path(0, "replica_count"))
    rest = [(index, pool) for index, pool in enumerate(pools) if index > 0]
    same = worker is not None and worker.get("machine_spec") == chief.get("machine_spec")
    if worker is not None and same and not Pool(1, worker).is_reducers and worker.get("replica_count"):
        worker["replica_count"] += count - 1
        draft.comment(pools_path(1, "replica_count"), f"with {count - 1} of pool 0")
    else:
        draft.arrange_pools([(0, chief), (None, {**copy.deepcopy(chief), "replica_count": count - 1}), *rest])
    draft.put(pools_path(0, "replica_count"), 1, reason, leaves=leaves)


def _servers(draft: SpecDraft, servers: ReadPool) -> None:
    """Parameter servers in pool 0: they are pool 2, after the chief and the other workers."""
    worker = draft.pools[WORKER_POOL]
    count = worker.get("replica_count") or 1
    others = [(index, pool) for index, pool in enumerate(draft.pools) if index > 1]
    chief: ReadPool = {**copy.deepcopy(worker), "replica_count": 1}
    order: list[tuple[int | None, ReadPool]] = [(None, chief), (1, worker), (0, servers), *others]
    draft.arrange_pools(order[: EVALUATOR_POOL + 1])
    reason = f"{count} workers there: one of them is the chief, pool 0"
    draft.put(pools_path(1, "replica_count"), max(1, count - 1), reason)
    draft.comment(pools_path(2), "pool 0 there: replicas of pool 2 are parameter servers")


def _empty_pool(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    index = violation.field[1]
    assert isinstance(index, int)
    pool = draft.pools[index]
    if pool and pool.get("replica_count") is None:
        draft.put(pools_path(index, "replica_count"), 1, "nothing there: one replica")
    elif index == len(draft.pools) - 1:
        draft.remove(pools_path(index), Outcome.DROPPED, "an empty pool")
    else:
        draft.remove(pools_path(len(draft.pools) - 1), Outcome.REFUSED, violation.sentence)


def _extra_pools(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(pools_path(len(draft.pools) - 1), Outcome.REFUSED, violation.sentence)


def _task(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    """A pool runs one container or one package: that of pool 0, or an example, where it has none."""
    index = violation.field[1]
    assert isinstance(index, int)
    pool = draft.pools[index]
    if "python_package_spec" in pool and "container_spec" in pool:
        draft.remove(pools_path(index, "python_package_spec"), Outcome.REFUSED, violation.sentence)
        return
    others = [Pool(0, other) for other in draft.pools if other is not pool]
    task = next((task for other in others if not other.is_reducers and (task := _whole_task(other))), None)
    if task and "container_spec" not in pool:
        draft.put(pools_path(index, task[0]), copy.deepcopy(task[1]), "no container there: that of another pool")
    elif "container_spec" in pool and task and task[0] == "container_spec":
        image = task[1].get("image_uri")
        draft.put(pools_path(index, "container_spec", "image_uri"), image, "no image there: that of another pool")
    else:
        reason = "no image there: an example, put in your own"
        draft.put(pools_path(index, "container_spec", "image_uri"), EXAMPLE_IMAGE, reason)


def _whole_task(pool: Pool) -> tuple[str, ReadContainer | ReadPackage] | None:
    """The container that has an image, or else the package of a pool, with its field's name; None for neither."""
    if pool.image_uri:
        return "container_spec", pool.container
    return ("python_package_spec", pool.package) if pool.package else None


def _misplaced_reducers(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    index = violation.field[1]
    assert isinstance(index, int)
    order: list[tuple[int | None, ReadPool]] = [item for item in enumerate(draft.pools) if item[0] != index]
    if len(order) < 2:
        draft.remove(pools_path(index), Outcome.REFUSED, "a Reduction Server is for two nodes or more")
        return
    order.insert(REDUCTION_SERVER_POOL, (index, draft.pools[index]))
    draft.arrange_pools(order)
    draft.comment(pools_path(REDUCTION_SERVER_POOL), f"pool {index} there: reducers are pool 2")


def _no_reducers(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(pools_path(REDUCTION_SERVER_POOL), Outcome.REFUSED, violation.sentence)


def _machine(draft: SpecDraft, violation: Violation, catalog: Catalog) -> None:
    """The machine that has the named accelerators, in the next number that exists."""
    index = violation.field[1]
    assert isinstance(index, int)
    path, spec = pools_path(index, "machine_spec"), draft.pools[index].get("machine_spec", {})
    gpu, count = spec.get("accelerator_type") or "", spec.get("accelerator_count") or 0
    if gpu and not catalog.machines_with(gpu):
        draft.remove((*path, "accelerator_type"), Outcome.REFUSED, violation.sentence)
        draft.remove((*path, "accelerator_count"), Outcome.REFUSED, violation.sentence)
        return
    if gpu and not count:
        machine = catalog.machines.get(spec.get("machine_type", ""))
        counts = machine.accelerators.get(gpu, ()) if machine else ()
        draft.put((*path, "accelerator_count"), counts[0] if counts else 1, "no count there")
        return
    if count and not gpu:
        _unnamed_gpus(draft, path, spec, catalog)
        return
    sizes = sorted({size for machine in catalog.machines_with(gpu) for size in machine.accelerators[gpu]})
    size = next((size for size in sizes if size >= count), sizes[-1])
    machine = next(candidate for candidate in catalog.machines_with(gpu) if size in candidate.accelerators[gpu])
    if size != count:
        draft.put((*path, "accelerator_count"), size, f"{count} there: no machine has that many")
    named = spec.get("machine_type")
    current = catalog.machines.get(named or "")
    if current is None or size not in current.accelerators.get(gpu, ()):
        reason = f"{named} there, which does not take {size} x {gpu}"
        draft.put((*path, "machine_type"), machine.machine_type, reason)


def _unnamed_gpus(draft: SpecDraft, path: Path, spec: ReadMachine, catalog: Catalog) -> None:
    machine = catalog.machines.get(spec.get("machine_type", ""))
    if machine and machine.accelerators:
        name = EXAMPLE_GPU if EXAMPLE_GPU in machine.accelerators else next(iter(machine.accelerators))
        draft.put((*path, "accelerator_type"), name, f"no type there: one that {machine.machine_type} takes")
    else:
        draft.remove((*path, "accelerator_count"), Outcome.REFUSED, "a count without a type, on a machine without GPUs")


def _no_machine(draft: SpecDraft, violation: Violation, catalog: Catalog) -> None:
    """A missing or impossible machine type: by its GPUs, by the nearest name, or that of pool 0."""
    index = violation.field[1]
    assert isinstance(index, int)
    path, spec = pools_path(index, "machine_spec"), draft.pools[index].get("machine_spec", {})
    named, gpu, count = spec.get("machine_type", ""), spec.get("accelerator_type", ""), spec.get("accelerator_count")
    near = re.findall(r"did you mean ([\w-]+)", violation.fix)
    machines = catalog.machines_with(gpu) if gpu else ()
    fitting = [machine.machine_type for machine in machines if count in machine.accelerators[gpu]]
    if Pool(index, draft.pools[index]).is_reducers:
        choice, why = REDUCER_MACHINES[0], "a machine of reducers"
    elif fitting:
        choice, why = fitting[0], f"the machine of {count} x {gpu}"
    elif near:
        choice, why = near[0], "the nearest that exists"
    else:
        choice, why = "n1-standard-8", "an example, put in your own"
    draft.put((*path, "machine_type"), choice, f"{named or 'nothing'} there: {why}")


def _builtin_gpus(draft: SpecDraft, violation: Violation, catalog: Catalog) -> None:
    index = violation.field[1]
    assert isinstance(index, int)
    path = pools_path(index, "machine_spec")
    machine = catalog.machines[draft.get((*path, "machine_type"))]
    reason = f"the GPUs of {machine.machine_type} are named"
    draft.put((*path, "accelerator_type"), machine.accelerator_type, reason)
    draft.put((*path, "accelerator_count"), machine.accelerator_counts[0], "")


def _tpu(draft: SpecDraft, violation: Violation, catalog: Catalog) -> None:
    path = violation.field if violation.field[-1] == "machine_spec" else (*violation.field, "machine_spec")
    name = str(draft.get((*path, "machine_type")) or draft.get((*path, "accelerator_type")))
    near = catalog.gpu_machine_like(name).split()[0]
    machine = catalog.machines.get(near) or catalog.machines["a2-ultragpu-8g"]
    spec: dict[str, object] = {"machine_type": machine.machine_type}
    if machine.accelerators:
        spec |= {"accelerator_type": machine.accelerator_type, "accelerator_count": machine.accelerator_counts[0]}
    draft.put(path, spec, f"TPUs ({name}) there: the trainer runs on GPUs, and this machine has as much memory")


def _set(name: str, value: object, reason: str) -> Callable[[SpecDraft, Violation, Catalog], None]:
    def mend(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
        draft.put((*violation.field[:-1], name), value, f"{reason}; found {violation.found}")

    return mend


def _reducer_count(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.put(violation.field, int(violation.fix.rpartition(" ")[2]), violation.sentence)


def _disk_type(draft: SpecDraft, violation: Violation, catalog: Catalog) -> None:
    machine = catalog.machines.get(draft.get((*violation.field[:2], "machine_spec", "machine_type")) or "")
    allowed = machine.boot_disk_types if machine else BOOT_DISK_TYPES
    draft.put(violation.field, allowed[0], violation.sentence)


def _disk_size(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    size = min(MAX_BOOT_DISK_GB, max(MIN_BOOT_DISK_GB, draft.get(violation.field)))
    draft.put(violation.field, size, violation.sentence)


def _reservation(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    affinity = {
        "reservation_affinity_type": "SPECIFIC_RESERVATION", "key": RESERVATION_KEY, "values": [EXAMPLE_RESERVATION]
    }  # fmt: skip
    draft.put(violation.field, affinity, f"{violation.sentence}: an example, put in your own")


def _standard(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.put(("scheduling", "strategy"), "STANDARD", violation.sentence)


def _no_disabled_retries(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(("scheduling", "disable_retries"), Outcome.DROPPED, violation.sentence)


def _package(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    examples = {
        "executor_image_uri": "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest",
        "package_uris": ["gs://example-bucket/package.tar.gz"],
        "python_module": "trainer.task",
    }
    draft.put(violation.field, examples[str(violation.field[-1])], "nothing there: an example, put in your own")


def _resource_id(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    name = str(draft.get(violation.field)).rpartition("/")[2]
    if re.fullmatch(r"[a-z][a-z0-9-]{1,61}[a-z0-9]", name) and name != draft.get(violation.field):
        draft.put(violation.field, name, violation.sentence)
    else:
        draft.remove(violation.field, Outcome.REFUSED, violation.sentence)


def _ranges(draft: SpecDraft, violation: Violation, _: Catalog) -> None:
    draft.remove(violation.field[:1], Outcome.REFUSED, violation.sentence)


REPAIRS: Mapping[str, Callable[[SpecDraft, Violation, Catalog], None]] = {
    "VP107": lambda draft, violation, _: draft.put(
        violation.field, violation.fix.rpartition(" ")[2], violation.sentence
    ),
    "VP202": _extra_pools,
    "VP203": _chief,
    "VP204": _empty_pool,
    "VP205": _task,
    "VP206": _no_machine,
    "VP207": _misplaced_reducers,
    "VP208": _drop,
    "VP209": _set("machine_type", REDUCER_MACHINES[0], "a machine of reducers"),
    "VP210": _no_reducers,
    "VP211": _no_reducers,
    "VP212": _no_reducers,
    "VP213": _extra_pools,
    "VP214": _tpu,
    "VP215": _reducer_count,
    "VP301": _no_machine,
    "VP303": _machine,
    "VP304": _machine,
    "VP305": _machine,
    "VP306": _machine,
    "VP307": _builtin_gpus,
    "VP309": _reservation,
    "VP310": _disk_type,
    "VP311": _disk_size,
    "VP312": _reservation,
    "VP401": _standard,
    "VP402": _standard,
    "VP403": _standard,
    "VP404": lambda draft, violation, _: draft.put(violation.field, "604800s", violation.sentence),
    "VP405": _drop,
    "VP406": _no_disabled_retries,
    "VP407": lambda draft, violation, _: draft.put(violation.field, True, violation.sentence),
    "VP408": _resource_id,
    "VP409": _drop,
    "VP503": _ranges,
    "VP601": _task,
    "VP605": _package,
    "VP701": _secret,
    "VP702": _secret,
    "VP703": _secret_word,
    "VP706": _drop,
    "VP707": _drop,
    "VP708": _drop,
    "VP709": _trial_word,
}
