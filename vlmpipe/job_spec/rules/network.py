"""Rules VP5xx: the job's network, what is mounted from it, and who the job runs as."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vlmpipe.config.service_forms import NETWORK
from vlmpipe.job_spec.read_forms import MountKind
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation

_ADDRESS = re.compile(r"[0-9.]+(/[0-9]+)?|[0-9a-fA-F:]*:[0-9a-fA-F:]*(/[0-9]+)?")
_FOLDER = re.compile(r"[A-Za-z0-9._-]+")
_MOUNTS: Mapping[MountKind, tuple[str, ...]] = {
    "nfs_mounts": ("server", "path", "mount_point"),
    "lustre_mounts": ("instance_ip", "volume_handle", "filesystem", "mount_point"),
}
# Variables of programs that use a service, variables that disable or redirect it, and words of commands that use it.
_SERVICES = {
    "Weights & Biases": (
        re.compile(r"WANDB_"),
        {"WANDB_MODE": {"offline", "disabled", "dryrun"}, "WANDB_DISABLED": {"true", "1"}, "WANDB_BASE_URL": None},
        re.compile(r"\bwandb\b"),
    ),
    "the Hugging Face hub": (
        re.compile(r"HF_(HUB_|TOKEN|ENDPOINT)|HUGGING_?FACE_HUB_|HUGGINGFACE_TOKEN"),
        {"HF_HUB_OFFLINE": {"1", "true", "yes", "on"}, "HF_ENDPOINT": None},
        re.compile(r"\bhuggingface\.co\b|\bpush[_-]to[_-]hub\b"),
    ),
}


def check(job: Job) -> Iterator[Violation]:
    """Peering, Private Service Connect, address ranges and the service account."""
    network, psc = job.spec.get("network"), job.spec.get("psc_interface_config")
    if network and psc:
        yield Violation("VP501", ("psc_interface_config",), "given with network", "one of the two")
    if network and not NETWORK.fits(network):
        fix = "gcloud projects describe PROJECT --format='value(projectNumber)' prints it"
        yield Violation("VP502", ("network",), network, NETWORK.expected, fix)
    for index, name in enumerate(job.spec.get("reserved_ip_ranges", ())):
        if _ADDRESS.fullmatch(name):
            fix = "gcloud compute addresses list --global --filter=purpose=VPC_PEERING prints the names"
            yield Violation("VP503", ("reserved_ip_ranges", index), name, "the name of a reserved range", fix)
    if job.spec.get("reserved_ip_ranges") and not network and job.knows("network"):
        fix = "set network; a network attachment has addresses of its own"
        yield Violation("VP506", ("reserved_ip_ranges",), "given without network", "the network of the ranges", fix)
    yield from _dns_peering(job)
    for pool in job.pools:
        yield from _mounts(pool, has_network=bool(network or psc) or not job.knows("network"))
    if network or psc:
        yield from _services(job, "network" if network else "psc_interface_config")
    if not job.spec.get("service_account") and job.knows("service_account"):
        expected = "an account for this job; without one it runs as the project's Vertex AI custom code agent"
        fix = "write NAME@PROJECT.iam.gserviceaccount.com; the account of a pipeline is not inherited"
        yield Violation("VP505", ("service_account",), "nothing", expected, fix)


def _dns_peering(job: Job) -> Iterator[Violation]:
    psc = job.spec.get("psc_interface_config", {})
    for index, peering in enumerate(psc.get("dns_peering_configs", ())):
        path = ("psc_interface_config", "dns_peering_configs", index)
        for name in ("domain", "target_project", "target_network"):
            if not peering.get(name) and job.knows(*path, name):
                yield Violation("VP507", (*path, name), "nothing", "a domain, the project and the network of its zone")
        domain = peering.get("domain", "")
        if domain and not domain.endswith("."):
            yield Violation("VP507", (*path, "domain"), domain, "a DNS suffix that ends with a dot", f"write {domain}.")
    if psc.get("dns_peering_configs") and not psc.get("network_attachment"):
        yield Violation(
            "VP508", ("psc_interface_config",), "dns_peering_configs without network_attachment", "both of them"
        )


def _mounts(pool: Pool, *, has_network: bool) -> Iterator[Violation]:
    """NFS shares and Lustre file systems of a pool, which are in a private network and have a folder each."""
    for kind, fields in _MOUNTS.items():
        places: set[str] = set()
        mounts = pool.spec.get(kind, [])
        if mounts and not has_network:
            fix = "set network or psc_interface_config"
            yield Violation(
                "VP509", pool.at(kind), "mounts without a network", "the private network of the server", fix
            )
        for index, mount in enumerate(mounts):
            for name in fields:
                if not mount.get(name) and pool.knows(kind, index, name):
                    yield Violation("VP510", pool.at(kind, index, name), "nothing", f"{', '.join(fields)} of the mount")
            if kind == "nfs_mounts" and (path := mount.get("path", "")) and not path.startswith("/"):
                yield Violation("VP510", pool.at(kind, index, "path"), path, "a path that begins with /")
            if (place := mount.get("mount_point", "")) and not _FOLDER.fullmatch(place):
                root = f"/mnt/{kind.partition('_')[0]}"
                expected, fix = f"the name of a folder, which is made under {root}", f"write {place.rpartition('/')[2]}"
                yield Violation("VP510", pool.at(kind, index, "mount_point"), place, expected, fix)
            elif place in places:
                yield Violation("VP511", pool.at(kind, index, "mount_point"), f"{place} twice", "a folder for each")
            places.add(place)


def _services(job: Job, network: str) -> Iterator[Violation]:
    for service, (names, silenced_by, words) in _SERVICES.items():
        if path := _first_use(job, names, silenced_by, words):
            expected = "a way out of the private network (Cloud NAT), which it need not have"
            fix = "write to Cloud Storage and bring weights there beforehand, or check the route"
            yield Violation("VP504", path, f"{service} with {network}", expected, fix)


def _first_use(
    job: Job, names: re.Pattern[str], silenced_by: dict[str, set[str] | None], words: re.Pattern[str]
) -> FieldPath:
    """Where a pool first names the service; empty if none does, or if the service is switched off or private there."""
    for pool in job.pools:
        variables = list(pool.environment())
        values = {name: value for _, name, value in variables}
        if any(
            name in values and (quiet is None or values[name].lower() in quiet) for name, quiet in silenced_by.items()
        ):
            continue
        for path, name, _ in variables:
            if names.match(name):
                return path
        for path, word in pool.words():
            if words.search(word):
                return path
    return ()
