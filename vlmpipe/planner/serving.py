"""What the run file's deploy section asks of the machine that serves."""

from __future__ import annotations

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import RunConfig

MB_PER_GIB = 1024


def unservable(config: RunConfig) -> tuple[str, ...]:
    """Why deploy.machine_type cannot serve the model, with a remedy; empty for nothing, and for an unknown machine.

    Shared memory is a part of the machine's memory (aiplatform_v1 ModelContainerSpec.shared_memory_size_mb).
    """
    deploy = config.deploy
    machine = load_catalog().machines.get(deploy.machine_type) if deploy else None
    if deploy is None or machine is None or deploy.shared_memory_size_mb < machine.memory_gib * MB_PER_GIB:
        return ()
    return (
        f"deploy.shared_memory_size_mb {deploy.shared_memory_size_mb} is not less than the memory of "
        f"{machine.machine_type}, {machine.memory_gib * MB_PER_GIB:,.0f} MB: lower it, or use a larger machine",
    )
