"""The disks that a pipeline is compiled with: what the plan finds, without building a model that cannot need more."""

from __future__ import annotations

from vlmpipe.catalog.machines import load_models
from vlmpipe.catalog.steps import load_steps
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.steps.estimate import USED_SHARE, step_disks
from vlmpipe.planner.steps.needs import GB, all_samples
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.sizing.model_shape import ModelShape

MOST_BYTES = 10  # for each parameter: a program's adapter is merged beside its base


def compiled_disks(config: RunConfig) -> dict[str, int]:
    """GB of the boot disks of steps that need another than the default one, by step.

    A model whose sizes cannot be read here leaves its steps the default disk, unless cluster.step_disks says more.
    """
    shape = None if _is_small(config) else _shape(config)
    samples = config.plan.samples or None
    return step_disks(config, shape=shape, samples=all_samples(samples, config.data.validation_fraction))


def _is_small(config: RunConfig) -> bool:
    """Whether the whole model fits on a default disk in any form: by the catalogue, which takes no time to read."""
    known, sources = load_models(), [part for part in config.model.sources.values() if part]
    if any(part.weights not in known for part in sources):
        return False
    facts = load_steps()
    free = USED_SHARE * facts.free_gb(facts.boot_disk_size_gb, "pipeline") * GB
    return sum(known[part.weights].parameters for part in sources) * MOST_BYTES <= free


def _shape(config: RunConfig) -> ModelShape | None:
    try:
        return architecture(config).shape
    except UserError:  # `vlmpipe plan` and the run's first step name it
        return None
