"""Rules VP707 and VP708: variables of networks that the nodes do not have."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.catalog.nccl import NET_VARIABLE, NO_PLUGIN, load_misfits, load_networks
from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.violation import Violation


def check(job: Job) -> Iterator[Violation]:
    """NCCL's variables on each pool's machine, where that has GPUs and is known."""
    for pool in job.pools:
        machine = job.machine(pool)
        if machine is None or not machine.network or not (pool.accelerator_type or machine.accelerators_fixed):
            continue
        network = load_networks()[machine.network]
        instead = f"uses {network.carries}" if network.plugin == NO_PLUGIN else f"has {network.plugin}"
        for path, name, value in pool.environment():
            for misfit in load_misfits():
                if machine.network not in misfit.suits and misfit.means(name, value):
                    what = f"{name}={value}" if name == NET_VARIABLE else name
                    expected = f"no variable for {misfit.of}: {machine.machine_type} {instead}"
                    yield Violation(misfit.rule, path, f"{what} on {machine.machine_type}", expected, "leave it out")
