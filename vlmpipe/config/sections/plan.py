"""The run file's `plan` section: what the planner assumes, and what needs confirmation."""

from __future__ import annotations

from pydantic import Field

from vlmpipe.trainer.config.base import Section


class PlannedMachine(Section):
    """What is known of cluster.machine_type beside the planner's catalogue; null takes the catalogue's value."""

    nic_gbps: float | None = Field(
        None, gt=0, description="Network for traffic between machines, in Gbit/s each direction, whole machine."
    )
    memory_gib: float | None = Field(None, gt=0, description="The machine's own memory, in GiB.")
    usd_per_hour: float | None = Field(
        None, ge=0, description="Price of a machine with its GPUs, in US dollars an hour, however capacity is obtained."
    )


class PlanConfig(Section):
    """What the plan assumes for unknown values, and the cost above which it needs confirmation. Changes no result."""

    samples: int = Field(
        0, ge=0, description="Training samples, for data that is not prepared yet; 0 leaves hours and cost open."
    )
    sample_tokens: int = Field(
        0, ge=0, description="Mean tokens of a sample, image tokens included, for data that is not prepared yet."
    )
    sample_images: float = Field(1.0, ge=0, description="Mean images of a sample, for data that is not prepared yet.")
    confirm_above_usd: float = Field(
        100.0,
        ge=0,
        description="vlmpipe submit asks before it starts a run that is planned to cost more, in US dollars.",
    )
    fail_on_error: bool = Field(
        True, description="End a run on Vertex AI in its first step when the plan says that it would fail."
    )
    prices_file: str = Field(
        "",
        description="Prices of your own contract, in the form of the built-in prices.yaml, whose entries they replace.",
    )
    preemptions_per_node_hour: float = Field(
        0.02, ge=0, le=60, description="Assumed preemptions of a Spot node per hour; no platform states a rate."
    )
    failures_per_gpu_hour: float = Field(
        2e-5,
        ge=0,
        le=1,
        description="Assumed failures of a GPU and its share of a machine per hour, however capacity is obtained. One "
        "in 50,000 hours is that of 16,384 H100 in Meta's report on Llama 3.",
    )
    restart_s: float = Field(
        600.0,
        ge=0,
        description="Assumed time from a preemption to the first step after it, in seconds, without that of reading "
        "the checkpoint.",
    )
    checkpoint_save_s: float = Field(
        0.0, ge=0, description="Measured time for which a checkpoint stops training, in seconds; 0 estimates it."
    )
    machine: PlannedMachine = Field(
        default_factory=PlannedMachine, description="Machines that the catalogue does not know, or knows otherwise."
    )
    train_hours: float | None = Field(
        None,
        gt=0,
        description="Hours that train.trainer takes, whose speed the planner does not know; null takes the steps of "
        "plan.calibrate_from, or leaves hours and cost open.",
    )
    calibrate_from: str = Field(
        "",
        description="Folder of an earlier run on the same GPUs, gs:// too: steps are planned by as much slower or "
        "faster as its own were than its plan. latest is the last run of this name on these GPUs, whose difference was "
        "kept under output.root_uri; before there is one, the last probe.",
    )
    efficiency: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Measured share of the GPU's peak that computation reaches; 0 takes the planner's assumption.",
    )
