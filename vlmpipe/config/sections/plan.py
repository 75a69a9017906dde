"""The run file's `plan` section: what the planner assumes, and what needs confirmation."""

from __future__ import annotations

from pydantic import Field

from vlmpipe.trainer.config.base import Section


class PlannedMachine(Section):
    """Values of cluster.machine_type that replace the planner's catalogue; null takes the catalogue's value."""

    nic_gbps: float | None = Field(
        None,
        gt=0,
        description="Network bandwidth of the whole machine to other machines, in Gbit/s per direction. Set it for a "
        "machine that the catalogue lacks.",
    )
    memory_gib: float | None = Field(None, gt=0, description="Host memory of the machine, in GiB.")
    usd_per_hour: float | None = Field(
        None, ge=0, description="Price of a machine with its GPUs, in US dollars per hour, for any kind of capacity."
    )


class PlanConfig(Section):
    """Assumptions of the plan for unknown values, and the cost above which it needs confirmation. Changes no result."""

    samples: int = Field(
        0,
        ge=0,
        description="Number of training samples, for data that is not prepared yet; 0 leaves hours and cost unknown.",
    )
    sample_tokens: int = Field(
        0, ge=0, description="Mean tokens per sample, image tokens included, for data that is not prepared yet."
    )
    sample_images: float = Field(1.0, ge=0, description="Mean images per sample, for data that is not prepared yet.")
    confirm_above_usd: float = Field(
        100.0,
        ge=0,
        description="Planned cost of a run, a search or a month of a schedule, in US dollars, above which the command "
        "that starts it asks for confirmation.",
    )
    fail_on_error: bool = Field(
        True,
        description="End a run on Vertex AI in its first step if its plan has an error. Turn it off where a measured "
        "run contradicts the plan.",
    )
    prices_file: str = Field(
        "",
        description="File with the prices of your own contract, in the form of the built-in prices.yaml, whose entries "
        "they replace; empty for none. Set it where you do not pay list prices.",
    )
    preemptions_per_node_hour: float = Field(
        0.02, ge=0, le=60, description="Assumed preemptions of a Spot node per hour. Set it to the rate of your region."
    )
    failures_per_gpu_hour: float = Field(
        2e-5,
        ge=0,
        le=1,
        description="Assumed failures of a GPU and its share of a machine per hour, for any kind of capacity; the "
        "default is one in 50,000 hours. Set it to the rate of your "
        "machines.",
    )
    restart_s: float = Field(
        600.0,
        ge=0,
        description="Assumed seconds from a preemption to the first step after it, without reading weights and a "
        "checkpoint. Set it from an interrupted run.",
    )
    checkpoint_save_s: float = Field(
        0.0,
        ge=0,
        description="Measured seconds for which a checkpoint stops training; 0 estimates them. Set it from an earlier "
        "run.",
    )
    machine: PlannedMachine = Field(
        default_factory=PlannedMachine,
        description="Values of cluster.machine_type that the catalogue lacks or has differently.",
    )
    train_hours: float | None = Field(
        None,
        gt=0,
        description="Hours of training by train.trainer, whose speed the planner does not know; null takes the steps "
        "of plan.calibrate_from, or leaves hours and cost unknown.",
    )
    calibrate_from: str = Field(
        "",
        description="Folder of an earlier run on the same GPUs, local or gs://, whose measured step time over its "
        "planned one scales the plan; latest takes the last run of this name on these GPUs under output.root_uri, or "
        "else the last probe; empty scales nothing.",
    )
    efficiency: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Measured share of the GPU's peak that computation reaches; 0 takes the planner's assumption. Set "
        "it from an earlier run.",
    )
