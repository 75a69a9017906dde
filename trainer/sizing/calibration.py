"""Measured over planned step time of a run or a probe, which `plan.calibrate_from` applies to the next plan."""

from __future__ import annotations

from dataclasses import dataclass

PROBED = "calibration.json"  # in a probe's folder; that of a run is made from its plan and its metrics


@dataclass(frozen=True)
class Calibration:
    """`pace` is by how much steps were slower than planned without calibration; a probe's is that of products alone.

    Attributes:
        origin: a sentence for the plan.
        of_steps: whether steps of a training were measured. A probe's products stand for them until some are.
    """

    pace: float
    accelerator_type: str
    origin: str
    of_steps: bool = True

    @property
    def measures_steps(self) -> bool:
        """Return whether the calibration narrows a forecast: one without a GPU was not made."""
        return bool(self.accelerator_type) and self.of_steps


def kept_name(name: str, accelerator_type: str) -> str:
    """Where the calibration of the last run of this name on these GPUs is kept, under the root of all runs."""
    return f"calibrations/{name}/{accelerator_type}.json"
