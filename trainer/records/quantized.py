"""A quantized export beside the export that it was made of: a part of `evaluate.json`."""

from __future__ import annotations

from pydantic import JsonValue

from vlmpipe.trainer.records.record import Part

MEBIBYTE = 2**20


class QuantizedScores(Part):
    """Answers of a quantized export to the validation questions, or the obstacle to making or asking it.

    accepted: it is in the run's folder, and is registered with the model. same: answers that are the export's, with the
    same reason of their end. before, after: exact match of the export and of the quantized one. interval: of the
    difference, each end at 5 %. layers: how many are quantized. left: names of parts whose linear layers
    are not. group_size: input features with one scale; 0: all of an output feature.
    """

    obstacle: str = ""
    accepted: bool = False
    min_agreement: float = 0.0
    questions: int = 0
    same: int = 0
    before: float | None = None
    after: float | None = None
    interval: tuple[float, float] | None = None
    paired: dict[str, JsonValue] | None = None  # PairedCounts
    layers: int = 0
    left: tuple[str, ...] = ()
    group_size: int = 0
    export_bytes: int = 0
    quantized_bytes: int = 0
    wall_s: float = 0.0

    @property
    def agreement(self) -> float:
        """Share of answers that are the export's."""
        return self.same / self.questions if self.questions else 0.0

    def sentence(self, form: str) -> str:
        """Return the result in words. form: the format of the weights."""
        if self.before is None or self.after is None or self.interval is None:
            return f"no {form} export: {self.obstacle}"
        verdict = "accepted" if self.accepted else "refused and deleted"
        low, high = self.interval
        return (
            f"{form} export {verdict}: {self.agreement:.3f} of {self.questions:,} answers are the export's, "
            f"{self.min_agreement:.3f} required; exact match {self.after:.3f} in place of {self.before:.3f} "
            f"({low:+.3f} to {high:+.3f}, each end at 5 %); {self.quantized_bytes / MEBIBYTE:,.1f} MiB in place of "
            f"{self.export_bytes / MEBIBYTE:,.1f}"
        )
