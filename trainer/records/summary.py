"""Steps, figures and state of a training: `summary.json`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, JsonValue

from vlmpipe.trainer.records.record import Record


class Summary(Record):
    """Figures of a training that has ended or was stopped. A field is None where the training did not measure it.

    Tokens, times and steps made are sums over all starts of the run.
    """

    FILE: ClassVar[str] = "summary.json"
    STEP: ClassVar[str] = "train"
    INDENT: ClassVar[int | None] = None
    IS_SPARSE: ClassVar[bool] = True

    steps: int | None = None  # a training program of the user's own may not report it
    total_steps: int | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    tokens: int | None = None
    label_tokens: int | None = None
    starts: int | None = None
    steps_made: int | None = None
    steps_repeated: int | None = None
    wall_s: float | None = None
    loss_scale: float | None = None
    overflow_steps: int | None = None
    ema_decay: float | None = None
    checkpoint_stall_s: float | None = None
    goodput: float | None = None  # share of the time, restarts included, that was spent on steps that count
    class_a_requests: int | None = None  # to buckets, of all ranks of the last start until its last logged step
    class_b_requests: int | None = None
    peak_memory_gib: tuple[float, ...] = ()  # by rank
    world_size: int | None = None
    nodes: int | None = None
    reduction_server: str = ""
    reduction_server_nodes: int | None = None
    nccl_net_plugins: tuple[str, ...] = ()
    strategy: str = ""
    precision: str = ""
    compile: str = ""
    float8: str = ""
    resumed_from_step: int | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    features: str = ""
    initial_weights: dict[str, str] = Field(default_factory=dict)
    trainer: str = ""  # a program of the user's own
    result: str = ""  # of such a program: the folder under its results
    checkpoint: str = ""
    best_metric: str = ""  # of the validations while training
    best_step: int | None = None
    best_value: float | None = None
    best_checkpoint: str = ""  # the best of the committed ones, whose step may be another where a save has failed
    ended_early: str = ""  # why, where training ended before total_steps
    settings: dict[str, JsonValue] | None = None  # that differ from their defaults, as a resume compares them
    settings_sha256: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    def repeated_starts(self) -> int:
        """Return the number of starts where there was more than one, else 0."""
        return self.starts if self.starts and self.starts > 1 else 0
