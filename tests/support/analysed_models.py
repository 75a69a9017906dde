"""What the planner finds of a model, found by the process of the tests, which has torch.

It is kept on the disk for all processes: a command that a test starts would import torch and transformers for it, which
takes it seconds, and so would each of them after a change of the code.
"""

from __future__ import annotations

from vlmpipe.catalog.this_machine import this_machine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner import model_architecture
from vlmpipe.planner.memory import activations, pipeline_stage, zero_persistence
from vlmpipe.planner.sweep import plan_config

REMEMBERING = [  # all functions of these modules whose results a process remembers
    function
    for module in (activations, pipeline_stage, zero_persistence, model_architecture)
    for function in vars(module).values()
    if hasattr(function, "cache_clear")
]


def keep_analyses(config: RunConfig, *, here: bool = True) -> None:
    """Find what a plan needs. here: for a run on this machine, also once its data are prepared."""
    plan_config(config, here=this_machine() if here else None)
    if here:
        model_architecture.sharing_obstacle(config.model)


def forget_analyses() -> None:
    """Let this process find them again, or read what is kept."""
    for function in REMEMBERING:
        function.cache_clear()
