"""A way to run a training: what its time and cost are estimated for."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.catalog.machines import Gpu, Machine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.compiling import CompileChoice, compile_choice
from vlmpipe.trainer.sizing.model_shape import ModelShape


@dataclass(frozen=True)
class Scenario:
    """A run file with the model, the workload and the machines that it names."""

    config: RunConfig
    shape: ModelShape  # with images of the workload's mean size
    layout: Layout
    load: Workload
    machine: Machine
    gpu: Gpu | None  # None: CPU only, or a GPU whose rates are not known
    cached: bool = False  # features are read instead of computed

    @property
    def compiling(self) -> CompileChoice:
        """The resolved `train.compile`."""
        return compile_choice(
            self.config.train,
            on_gpu=bool(self.config.cluster.accelerator_count),
            parameters=self.shape.total_parameters,
            sequence_length=self.config.data.sequence_length,
            quantizes_base=self.config.model.quantizes_base,
        )
