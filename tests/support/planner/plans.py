"""A plan as JSON holds it, with round figures: what the tables and the report's page are tested on."""

from __future__ import annotations

import copy
from typing import Any

GIB = 2**30
# Shipped run files whose memory the default suite plans. Without analyses of models from an earlier run of the tests a
# plan takes seconds, so its tests share these; the whole form plans all.
PLANNED_BY_TESTS = (
    "arr-coc", "digits", "digits-preferences", "digits-stages", "llava-34b-tp", "llava-7b", "qwen2-5-vl-7b-qlora",
)  # fmt: skip


def _step(job: str, hours: float, usd_per_hour: float) -> dict[str, Any]:
    return {"job": job, "replicas": 4, "hours": hours, "usd_per_hour": usd_per_hour, "usd": hours * usd_per_hour}


def _term(term: str, share: float, *, possible: bool = True, interruptions: float = 0.0) -> dict[str, Any]:
    steps = [_step("train", 10.0, 160 * share), _step("evaluate", 0.5, 40 * share)]
    return {
        "term": term,
        "possible": possible,
        "why_not": "" if possible else "flex_start needs the same machine in all pools",
        "steps": steps,
        "train_hours": 10.0,
        "lost": {
            "every_s": 600.0,
            "saves_hours": 0.1,
            "rework_hours": 0.2 * interruptions,
            "restarts_hours": 0.3 * interruptions,
            "interruptions": interruptions,
        },
        "usd": sum(step["usd"] for step in steps),
        "missing": [],
        "old": False,
    }


def _pool(role: str, replicas: int, machine: str, gpu: str, gpus: int) -> dict[str, Any]:
    return {
        "role": role,
        "replica_count": replicas,
        "machine_type": machine,
        "accelerator_type": gpu,
        "accelerator_count": gpus,
        "boot_disk_type": "pd-ssd",
        "boot_disk_size_gb": 500,
        "image_uri": "us-docker.pkg.dev/example/image@sha256:0",
        "runs": "vlmpipe.trainer.train",
    }


_SPOT = _term("spot", 0.5, interruptions=4.0)
_PLAN: dict[str, Any] = {
    "name": "planned",
    "state": "green",
    "errors": [],
    "doubts": [],
    "findings": [],
    "model": {
        "parameters": 7_062_902_784,
        "trainable_parameters": 6_759_395_328,
        "parts": {"tower": 303_507_456},
        "frozen": ["tower"],
        "origin": "the run file",
    },
    "load": None,
    "jobs": {
        "train": [
            _pool("0 chief", 1, "a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8),
            _pool("1 workers", 3, "a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8),
        ],
        "evaluate": [_pool("0 chief", 1, "n1-standard-16", "", 0)],
    },
    "memory": {
        "device": "NVIDIA_H100_MEGA_80GB",
        "capacity_bytes": 80 * GIB,
        "total_bytes": 60 * GIB,
        "spare_bytes": 20 * GIB,
        "fits": True,
        "binding": "optimizer",
        "moment": "forward",
        "parts": [
            {"name": "weights", "bytes": 20 * GIB, "why": "fp32, trained"},
            {"name": "optimizer", "bytes": 39 * GIB, "why": "two moments in fp32"},
            {"name": "logits", "bytes": GIB // 2, "why": "of label tokens only"},
            {"name": "inputs", "bytes": GIB // 2, "why": "tokens, labels and images of a step"},
        ],
        "is_near": False,
        "nearest": [{"change": {"train.strategy": "fsdp"}, "total_bytes": 30 * GIB, "fits": True}],
        "host": None,
        "start": None,
    },
    "memory_beside_training": [],
    "time": {
        "step_s": 2.0,
        "parts": [
            {"name": "computing", "s": 1.5, "hidden": False},
            {"name": "all-reduce of gradients", "s": 0.498, "hidden": False},
            {"name": "waiting for data", "s": 0.002, "hidden": False},
            {"name": "communication overlapped with computing", "s": 0.7, "hidden": True},
        ],
        "mfu": 0.375,
        "binds": "computing",
        "steps": 18_000,
        "train_hours": 10.0,
        "tokens_per_s_per_gpu": 2_048.0,
        "save": {"blocks_s": 12.0, "writes_s": 0.0},
        "interval": {"low": 0.9, "high": 1.2, "origin": "8 of 10 published runs took 0.9 to 1.2 of their forecast."},
        "exposed_all_reduce_s": 0.498,
        "assumptions": ["Matrix products reach 68% of the GPU's peak.", "Rows are those of the prepared data."],
    },
    "compile": {"state": "on", "why": "7.1B parameters and 4,096 tokens a micro-batch: kernels are small"},
    "features_cache": {"state": "off", "why": "one epoch shows each image about once"},
    "reduction_server": {"state": "not possible", "why": "a3-megagpu-8g has a network plugin of its own"},
    "cost": {
        "by_term": {
            "standard": _term("standard", 1.0),
            "spot": _SPOT,
            "flex_start": _term("flex_start", 0.6, possible=False),
        },
        "elsewhere": {},
        "option_numbers": {},
        "is_lower_bound": False,
        "never_ends": False,
        "term": "spot",
        "usd": _SPOT["usd"],
        "usd_range": [0.9 * _SPOT["usd"], 1.2 * _SPOT["usd"]],
        "steps": _SPOT["steps"],
        "storage_bytes": 240_000_000_000,
        "storage_usd_per_month": 4.8,
        "schedule_runs_per_month": 4.0,
        "schedule_usd_per_month": 4 * _SPOT["usd"],
        "checkpoint_every_s": 900.0,
        "checkpoint_every_steps": 450,
        "expected_lost_hours": 2.1,
        "min_lost_hours": 1.9,
        "assumptions": ["Not counted: logs.", "Rows are those of the prepared data."],
        "missing": [],
    },
    "pipeline": None,
    "trainer": "",
    "nccl_plugin": "",
    "this_machine": None,
    "notes": ["Rows are those of the prepared data."],
}


def make_plan() -> dict[str, Any]:
    """A green plan that a test may change."""
    return copy.deepcopy(_PLAN)


def red() -> dict[str, Any]:
    """It does not fit, and Vertex AI would refuse the job."""
    plan = make_plan()
    plan["state"], plan["errors"] = "red", ["does not fit"]
    plan["memory"] |= {"capacity_bytes": 40 * GIB, "spare_bytes": -20 * GIB, "fits": False}
    plan["findings"] = [
        {
            "code": "VP999",
            "severity": "warning",
            "path": "job_spec.worker_pool_specs[0].disk_spec.boot_disk_type",
            "found": "pd-standard",
            "expected": "pd-ssd",
            "fix": "write pd-ssd",
            "source": "a document",
        },
        {
            "code": "VP101",
            "severity": "error",
            "path": "job_spec.worker_pool_specs[0].machine_spec.machine_type",
            "found": "a3-megagpu-9g",
            "expected": "a3-megagpu-8g",
            "fix": "write a3-megagpu-8g",
            "source": "a document",
        },
    ]
    return plan


def amber() -> dict[str, Any]:
    """How much data there is and a price are not known."""
    plan = make_plan()
    plan |= {"state": "amber", "doubts": ["the amount of data is unknown"]}
    plan["time"] |= {"steps": None, "train_hours": None}
    for found in plan["cost"]["by_term"].values():
        found |= {"usd": None, "train_hours": None, "lost": None}
        found["steps"][0] |= {"hours": None, "usd": None}
    spot = plan["cost"]["by_term"]["spot"]
    spot["missing"] = ["a3-megagpu-8g in us-central1, spot"]
    spot["steps"] = [step | {"usd_per_hour": None, "usd": None} for step in spot["steps"]]
    plan["cost"] |= {"usd": None, "steps": spot["steps"], "missing": spot["missing"], "schedule_usd_per_month": None}
    plan["cost"] |= {"checkpoint_every_s": None, "checkpoint_every_steps": None, "storage_usd_per_month": None}
    return plan


def without_gpu() -> dict[str, Any]:
    """Training on CPUs: no time is known, and so no cost."""
    plan = amber() | {"doubts": ["time and cost are unknown"]}
    why = "Training on CPUs: how fast they compute is not known."
    plan["time"] |= {"step_s": None, "parts": [], "mfu": None, "binds": "", "tokens_per_s_per_gpu": None}
    plan["time"]["assumptions"] = [why]
    plan["memory"] |= {"device": "n1-standard-16", "nearest": []}
    return plan


def sizes_unknown() -> dict[str, Any]:
    """The model's sizes are not known, so nothing is estimated."""
    plan = make_plan()
    plan |= dict.fromkeys(("model", "load", "memory", "time", "features_cache", "reduction_server", "cost"))
    plan |= {
        "state": "amber",
        "doubts": ["memory, time and cost are unknown"],
        "notes": ["Memory, time and cost are open: the model's sizes are not known."],
    }
    return plan


PLANS = {
    "green": make_plan,
    "red": red,
    "amber": amber,
    "without a GPU": without_gpu,
    "sizes unknown": sizes_unknown,
}
