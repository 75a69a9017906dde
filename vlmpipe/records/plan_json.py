"""The plan as `vlmpipe plan --json` prints it and the terminal's tables read it: `as_dict()` of a plan.

None: not known. What of it a later step reads from plan.json is `vlmpipe.records.plan`.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class FindingJson(TypedDict):
    code: str
    severity: str
    path: str
    found: str
    expected: str
    fix: str


class ModelJson(TypedDict):
    parameters: int
    trainable_parameters: int
    frozen: list[str]
    origin: str


class PoolJson(TypedDict):
    role: str
    replica_count: int
    machine_type: str
    accelerator_type: str
    accelerator_count: int
    boot_disk_type: str
    boot_disk_size_gb: int
    image_uri: str
    runs: str  # module that a launcher starts
    processes_per_replica: NotRequired[int]  # of a job's launchers on this machine


class PartJson(TypedDict):
    name: str
    bytes: int
    why: str


class HostMemoryJson(TypedDict):
    machine: str
    capacity_bytes: int
    total_bytes: int
    fits: bool
    parts: list[PartJson]


class SettingJson(TypedDict):
    change: dict[str, object]
    total_bytes: int
    fits: bool


class MemoryJson(TypedDict):
    device: str
    capacity_bytes: int
    total_bytes: int
    spare_bytes: int
    fits: bool
    is_near: bool
    moment: str
    parts: list[PartJson]
    nearest: list[SettingJson]
    host: HostMemoryJson | None
    start: HostMemoryJson | None


class JobMemoryJson(TypedDict):
    job: str
    device: str
    devices: int
    capacity_bytes: int
    total_bytes: int
    fits: bool
    parts: list[PartJson]
    host: HostMemoryJson | None


class TimePartJson(TypedDict):
    name: str
    s: float
    hidden: bool


class IntervalJson(TypedDict):
    low: float
    high: float
    origin: str


class TimeJson(TypedDict):
    step_s: float | None
    parts: list[TimePartJson]
    mfu: float | None
    binds: str
    steps: int | None
    train_hours: float | None
    tokens_per_s_per_gpu: float | None
    assumptions: list[str]
    interval: IntervalJson | None


class StepCostJson(TypedDict):
    job: str
    hours: float | None
    usd_per_hour: float | None
    usd: float | None


class LostJson(TypedDict):
    rework_hours: float
    restarts_hours: float
    interruptions: float


class TermCostJson(TypedDict):
    possible: bool
    why_not: str
    steps: list[StepCostJson]
    lost: LostJson | None
    usd: float | None
    missing: list[str]


class RequestsJson(TypedDict):
    reading: str
    step: float
    save: float
    class_a: float
    class_b: float
    usd: float | None


class CostJson(TypedDict):
    by_term: dict[str, TermCostJson]
    elsewhere: dict[str, TermCostJson]
    option_numbers: dict[str, int]
    term: str
    usd: float | None
    usd_range: tuple[float, float] | None
    is_lower_bound: bool
    never_ends: bool
    steps: list[StepCostJson]
    storage_bytes: int
    storage_usd_per_month: float | None
    schedule_runs_per_month: float | None
    schedule_usd_per_month: float | None
    checkpoint_every_s: float | None
    checkpoint_every_steps: int | None
    assumptions: list[str]
    missing: list[str]
    requests: NotRequired[RequestsJson | None]  # plans of earlier releases have none


class ServingJson(TypedDict):
    machines: str
    min_replicas: int
    max_replicas: int
    usd_per_month: float | None
    most_usd_per_month: float | None
    missing: list[str]
    usd_per_wake: NotRequired[float | None]  # plans of earlier releases have none


class PlaceMonthsJson(TypedDict):
    name: str
    machine: str
    missing: list[str]
    usd_per_month: list[float | None]
    replicas: list[int]


class CheapestFromJson(TypedDict):
    questions_a_day: float
    name: str


class ServingPlacesJson(TypedDict):
    questions_a_day: list[int]
    places: list[PlaceMonthsJson]
    cheapest: list[str]
    changes: list[CheapestFromJson]
    question_s: float | None
    starts_on_cloud_run_usd: float | None


class ManagedJson(TypedDict):
    low_usd: float
    high_usd: float
    sellers: list[str]
    date: str


class BillJson(TypedDict):
    usd: float | None
    requests_usd: float | None
    network_usd: float | None
    storage_usd_per_month: float | None
    is_lower_bound: bool
    tokens: float | None
    samples: float | None
    serving: ServingJson | None
    managed: ManagedJson | None
    places: NotRequired[ServingPlacesJson | None]  # plans of earlier releases have none
    if_deployed: NotRequired[ServingJson | None]  # likewise
    not_deployable: NotRequired[str]
    whole_usd: float | None
    usd_per_million_tokens: float | None
    usd_per_thousand_samples: float | None


class PipelineStepJson(TypedDict):
    name: str
    is_job: bool
    machine: str
    tasks: int
    disk_free_bytes: int
    disk_needed_bytes: int | None
    memory_bytes: int | None
    memory_needed_bytes: int | None
    start_s: float
    work_s: float | None
    watches_s: float | None
    usd: float | None


class PipelineJson(TypedDict):
    machines: int
    hours: float
    usd: float | None
    errors: list[str]
    steps: list[PipelineStepJson]
    assumptions: list[str]


class AdviceJson(TypedDict):
    state: str
    why: str


class MachineJson(TypedDict):
    text: str


State = Literal["green", "amber", "red"]


class PlanJson(TypedDict):
    name: str
    state: State
    errors: list[str]
    doubts: list[str]
    findings: list[FindingJson]
    model: ModelJson | None
    jobs: dict[str, list[PoolJson]]
    memory: MemoryJson | None
    memory_beside_training: list[JobMemoryJson]
    time: TimeJson | None
    compile: AdviceJson | None
    features_cache: AdviceJson | None
    reduction_server: AdviceJson | None
    cost: CostJson | None
    bill: NotRequired[BillJson | None]  # plans of earlier releases have none
    pipeline: PipelineJson | None
    trainer: str
    nccl_plugin: str
    this_machine: MachineJson | None
    notes: list[str]


class StagePlanJson(PlanJson):
    starts_from: str
    data: str


class StagesPlanJson(TypedDict):
    name: str
    state: State
    errors: list[str]
    doubts: list[str]
    train_hours: float | None
    train_hours_range: tuple[float, float] | None
    usd: float | None
    usd_range: tuple[float, float] | None
    schedule_runs_per_month: float | None
    schedule_usd_per_month: float | None
    bill: NotRequired[BillJson | None]
    stages: dict[str, StagePlanJson]


class VariantJson(TypedDict):
    state: State
    trains: bool
    train_hours: float | None
    evaluate_hours: float | None
    usd: float | None
    memory: MemoryJson | None
    steps: int | None


class SweepPlanJson(TypedDict):
    name: str
    state: State
    errors: list[str]
    doubts: list[str]
    hours: float | None
    elapsed_hours: float | None
    usd: float | None
    usd_range: tuple[float, float] | None
    bill: NotRequired[BillJson | None]  # plans of earlier releases have none
    starts: int
    parallelism: int
    trainings: int
    shared_hours: float | None
    shared_usd: float | None
    shared: PlanJson | StagesPlanJson
    variants: dict[str, VariantJson]
