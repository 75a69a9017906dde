"""Rules VP3xx: machine, accelerators, region, reservations and boot disk, against the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation

if TYPE_CHECKING:
    from vlmpipe.catalog.machines import Catalog, Machine

MIN_BOOT_DISK_GB, MAX_BOOT_DISK_GB = 100, 64_000
BOOT_DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
SPECIFIC_RESERVATION = "SPECIFIC_RESERVATION"
_CONSUMING = (SPECIFIC_RESERVATION, "ANY_RESERVATION")
_RESERVATION = re.compile(r"projects/[^/]+/zones/(?P<region>[a-z0-9-]+)-[a-z]/reservations/.+")
# Family, kind and size, as in n2-standard-16, a2-highgpu-1g or c2d-highmem-8.
_MACHINE_TYPE = re.compile(r"(?P<family>[a-z][0-9]+[a-z]{0,2})-[a-z]+-[0-9]+g?")


def check(job: Job) -> Iterator[Violation]:
    """Each pool's machine. Other rules check reducers; TPU hosts are not in the catalogue."""
    for pool in job.pools:
        yield from _disk_size(pool)
        if pool.is_reducers:
            continue
        machine = job.machine(pool)
        yield from _pair(pool)
        yield from _partition(pool)
        yield from _reservation(job, pool)
        yield from _disk_type(pool, machine)
        if pool.is_tpu:
            continue
        if machine:
            yield from _accelerators(job.catalog, pool, machine)
            yield from _needed_reservation(pool, machine)
        elif pool.machine_type:
            yield _unknown(job.catalog, pool)
        yield from _region(job, pool)


def _pair(pool: Pool) -> Iterator[Violation]:
    """Type and count are given together. TPU hosts of newer kinds have neither."""
    name, count = _paths(pool)
    if pool.accelerator_type and not pool.accelerator_count and pool.knows("machine_spec", "accelerator_count"):
        yield Violation("VP305", count, "nothing", f"the number of {pool.accelerator_type}")
    if pool.accelerator_count and not pool.accelerator_type and pool.knows("machine_spec", "accelerator_type"):
        yield Violation("VP306", name, "nothing", f"the type of the {pool.accelerator_count} accelerators")


def _accelerators(catalog: Catalog, pool: Pool, machine: Machine) -> Iterator[Violation]:
    requested, count = pool.accelerator_type, pool.accelerator_count
    name_path, count_path = _paths(pool)
    if requested and requested not in machine.accelerators:
        takes = ", ".join(machine.accelerators) or "no accelerator"
        others = catalog.machines_with(requested)
        fix = f"{requested} is on {_some(others)}" if others else f"no machine in the catalogue has {requested}"
        expected = f"{takes}: what {machine.machine_type} takes"
        yield Violation("VP303", name_path, f"{requested} on {machine.machine_type}", expected, fix)
    elif requested and count and count not in machine.accelerators[requested]:
        allowed = machine.accelerators[requested]
        others = tuple(other for other in catalog.machines_with(requested) if count in other.accelerators[requested])
        fix = f"{count} x {requested} is on {_some(others)}" if others else ""
        expected = f"{' or '.join(map(str, allowed))} on {machine.machine_type}"
        yield Violation("VP304", count_path, str(count), expected, fix)
    elif machine.accelerators_fixed and not requested and not count and pool.knows("machine_spec", "accelerator_type"):
        (count, *_) = machine.accelerator_counts
        fix = f"write accelerator_type: {machine.accelerator_type} and accelerator_count: {count}"
        yield Violation("VP307", name_path, "nothing", f"the accelerators of {machine.machine_type}", fix)


def _partition(pool: Pool) -> Iterator[Violation]:
    size, count = pool.machine.get("gpu_partition_size"), pool.accelerator_count
    if size and count != 1 and pool.knows("machine_spec", "accelerator_count"):
        expected = "1: it counts GPUs, each of which is partitioned"
        yield Violation("VP315", _paths(pool)[1], f"{count} with gpu_partition_size {size}", expected)


def _reservation(job: Job, pool: Pool) -> Iterator[Violation]:
    """Reservations are named in full, lie in the job's region, and hold machines at the standard price."""
    affinity = pool.machine.get("reservation_affinity", {})
    path, kind = pool.at("machine_spec", "reservation_affinity"), affinity.get("reservation_affinity_type", "")
    strategy, values = job.scheduling.get("strategy"), affinity.get("values", [])
    if kind == SPECIFIC_RESERVATION and not (affinity.get("key") and values):
        fix = "write key: compute.googleapis.com/reservation-name and the reservation's full name in values"
        yield Violation("VP312", path, f"{kind} without {'values' if affinity.get('key') else 'key'}", "both", fix)
    for index, name in enumerate(values):
        zone = _RESERVATION.fullmatch(name)
        if zone and job.region and zone["region"] != job.region:
            expected = f"a reservation in a zone of {job.region}, where the job runs"
            yield Violation("VP313", (*path, "values", index), name, expected, "or run the job in its region")
    if kind in _CONSUMING and strategy in ("SPOT", "FLEX_START"):
        fix = "use STANDARD, or leave the affinity out"
        expected = f"no reservation: {strategy} machines do not come from one"
        yield Violation("VP314", path, f"{kind} with strategy {strategy}", expected, fix)


def _needed_reservation(pool: Pool, machine: Machine) -> Iterator[Violation]:
    affinity = pool.machine.get("reservation_affinity", {})
    path = ("machine_spec", "reservation_affinity")
    specific = affinity.get("reservation_affinity_type") == SPECIFIC_RESERVATION
    if machine.needs_reservation and not specific and pool.knows(*path, "reservation_affinity_type"):
        yield Violation(
            "VP309",
            pool.at(*path),
            affinity.get("reservation_affinity_type", "nothing"),
            f"{SPECIFIC_RESERVATION}: {machine.machine_type} is only to be had from a shared reservation",
            "name yours with key: compute.googleapis.com/reservation-name and values",
        )


def _region(job: Job, pool: Pool) -> Iterator[Violation]:
    regions = job.catalog.regions.get(pool.accelerator_type, ())
    if job.region and regions and job.region not in regions:
        hint = did_you_mean(job.region, list(regions)).removeprefix("; ")
        actual = f"{pool.accelerator_type} in {job.region}"
        yield Violation("VP308", _paths(pool)[0], actual, f"a region that offers it: {', '.join(regions)}", hint)


def _disk_type(pool: Pool, machine: Machine | None) -> Iterator[Violation]:
    disk = pool.spec.get("disk_spec", {}).get("boot_disk_type")
    allowed = machine.boot_disk_types if machine else BOOT_DISK_TYPES
    if disk and disk not in allowed:
        hint = did_you_mean(disk, list(allowed)) if disk not in BOOT_DISK_TYPES else ""
        where = f" on {machine.machine_type}" if machine else ""
        expected = f"{' or '.join(allowed)}{where}{hint}"
        yield Violation("VP310", pool.at("disk_spec", "boot_disk_type"), disk, expected)


def _disk_size(pool: Pool) -> Iterator[Violation]:
    size_gb = pool.spec.get("disk_spec", {}).get("boot_disk_size_gb")
    if size_gb and not MIN_BOOT_DISK_GB <= size_gb <= MAX_BOOT_DISK_GB:
        expected = f"{MIN_BOOT_DISK_GB} to {MAX_BOOT_DISK_GB:,} GB"
        yield Violation("VP311", pool.at("disk_spec", "boot_disk_size_gb"), f"{size_gb:,} GB", expected)


def _unknown(catalog: Catalog, pool: Pool) -> Violation:
    """An error for an impossible machine, a warning for one of a family that is not in the catalogue."""
    path, name = pool.at("machine_spec", "machine_type"), pool.machine_type
    form = _MACHINE_TYPE.fullmatch(name)
    held = {machine.partition("-")[0] for machine in catalog.machines}
    if form and form["family"] not in held:
        return Violation("VP302", path, name, "a machine of the catalogue: this one is not checked further")
    hint = did_you_mean(name, list(catalog.machines)).removeprefix("; ")
    return Violation("VP301", path, name, "a machine type that Vertex AI training offers", hint)


def _paths(pool: Pool) -> tuple[FieldPath, FieldPath]:
    return pool.at("machine_spec", "accelerator_type"), pool.at("machine_spec", "accelerator_count")


def _some(machines: Sequence[Machine]) -> str:
    """A few of the machines by name."""
    names = ", ".join(machine.machine_type for machine in machines[:4])
    return f"{names} and {len(machines) - 4} more" if len(machines) > 4 else names
