"""What `vlmpipe diagnose` says to do is done to a failed run with a checkpoint, and the run would go on.

Each pattern stands in the table with the settings that its remedies name. A remedy that names one more is not in it,
and the test says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.checkpoints import record
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.runs.changed_settings import require_resumable
from vlmpipe.runs.failure_patterns import Pattern, patterns
from vlmpipe.runs.folders.choice import open_run
from vlmpipe.trainer.checkpoint.commit import Checkpoint
from vlmpipe.trainer.checkpoint.resume import require_same_run
from vlmpipe.trainer.checkpoint.resume_rules import settings_of
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

FILE = ROOT / "configs/digits.yaml"
MACHINE = "{machine_type: n1-highmem-16}"


@dataclass(frozen=True)
class Trial:
    """What of a remedy is tried. `starts_over`: settings with which no checkpoint is found or fits, as it says."""

    overrides: tuple[str, ...] = ()
    starts_over: tuple[str, ...] = ()
    before: tuple[str, ...] = ()  # what the run began with
    saved: bool = True  # whether it can have a checkpoint
    fresh: bool = False  # the text names --fresh


SAME = Trial()
TRIALS: dict[str, Trial] = {
    "stalled": Trial(("train.stall_floor_s=900",)),
    "machine": Trial(("cluster.machine_check=warn",)),
    "gpu-out-of-memory": Trial(
        (
            "train.micro_batch_size=1", "train.activation_checkpointing=full", "train.strategy=fsdp",
            "train.context_parallel=2", "evaluate.batch_questions=8", f"cluster.evaluate_machine={MACHINE}",
            "features.batch_images=8", f"cluster.features_machine={MACHINE}",
        ),
        starts_over=("data.sequence_length=128",),
    ),
    "vertex-out-of-memory": Trial(
        (
            "cluster.machine_type=n1-highmem-16", "cluster.processes_per_replica=2", "evaluate.batch_questions=8",
            f"cluster.evaluate_machine={MACHINE}", f"cluster.features_machine={MACHINE}",
        ),
        before=("cluster.processes_per_replica=4", "train.global_batch_size=16"),
    ),
    "killed": Trial(
        (
            "train.micro_batch_size=1", "cluster.machine_type=n1-highmem-16", "evaluate.batch_questions=8",
            f"cluster.evaluate_machine={MACHINE}",
        ),
    ),
    "no-space": Trial(("cluster.boot_disk_size_gb=200",), starts_over=("output.root_uri=ELSEWHERE",)),
    "storage-permission": Trial(("gcp.service_account=b@p.iam.gserviceaccount.com",)),
    "folder-permission": Trial(starts_over=("output.root_uri=ELSEWHERE",)),
    "act-as-service-account": Trial(
        ("gcp.service_account=b@p.iam.gserviceaccount.com", "gcp.job_service_account=c@p.iam.gserviceaccount.com")
    ),
    "vertex-role": Trial(("gcp.service_account=b@p.iam.gserviceaccount.com",)),
    "bucket-missing": Trial(("gcp.pipeline_root=gs://other/root",), ("output.root_uri=ELSEWHERE",), saved=False),
    "vertex-stockout": Trial(
        ("cluster.scheduling_strategy=flex_start", "cluster.accelerator_type=NVIDIA_TESLA_T4",
         "cluster.accelerator_count=1", "cluster.max_wait_duration=3600s"),
    ),
    "machine-reclaimed": Trial(("train.checkpoint_every_steps=50",)),
    "not-finite": Trial(
        ("train.optimizer.learning_rate=1e-4", "train.warmup_fraction=0.3", "train.clip_grad_norm=0.5")
    ),
    "too-many-rejects": Trial(("data.max_reject_fraction=0.5",), saved=False),
    "checkpoint-corrupt": Trial(("checkpoint.mirror_uri=/mirror",), fresh=True),
    "checkpoint-of-another": Trial(fresh=True),
    "no-progress": Trial(("checkpoint.max_starts_without_progress=9",)),
    "run-goes-on": Trial(fresh=True),
    "gated-model": Trial(("model.hub_token_secret=projects/p/secrets/hub",)),
    "collective-timeout": Trial(("train.stall_floor_s=400",)),
    "job-timeout": Trial(("cluster.timeout=86400s",)),
    "plan-red": Trial(("plan.fail_on_error=false",)),
    "spend-limit": Trial(
        ("cluster.max_spend_usd=500",),
        before=("cluster.capacity_fallback=[spot, standard]", "cluster.max_spend_usd=100"),
    ),
    "mirror-lags": Trial(("train.keep_checkpoints=9",)),
    "waits-for-data": Trial(("data.loader_threads=4",)),
    "idle-gpus": Trial(("train.compile=on", "train.micro_batch_size=2")),
}  # fmt: skip
# Fields that a remedy names to read, or of a program that this run file does not have.
NAMED_ONLY = {
    "missing-package": {"train.trainer"},
    "weights-not-resumed": {"train.trainer.resume_as_model"},
}
COMMANDS = re.compile(r"--fresh|--run-id")


def texts(pattern: Pattern) -> str:
    return " ".join((pattern.remedy, *pattern.remedies.values()))


def fields_in(text: str) -> set[str]:
    sections = "|".join(field.alias or name for name, field in RunConfig.model_fields.items())
    return set(re.findall(rf"\b(?:{sections})(?:\.[a-z]\w*)+", text))


@cache
def of(*overrides: str) -> RunConfig:
    return load_run_file(FILE, overrides)


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_everything_that_a_remedy_names_is_tried(pattern: Pattern) -> None:
    trial = TRIALS.get(pattern.id, SAME)
    tried = {text.partition("=")[0] for text in (*trial.overrides, *trial.starts_over)}
    named = fields_in(texts(pattern)) - NAMED_ONLY.get(pattern.id, set())
    helpers = {"cluster.accelerator_type", "cluster.accelerator_count", "cluster.max_wait_duration"}
    assert named <= tried and tried - helpers <= named
    assert trial.fresh == ("--fresh" in texts(pattern))
    if trial.starts_over:
        assert re.search(r"run of its own|starts from the beginning|correct output\.root_uri", texts(pattern))
    if trial.overrides and pattern.kind == "cause":
        assert not re.search(r"[Tt]he same command then continues", texts(pattern)), "it is another one"


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_a_run_goes_on_after_its_remedy(pattern: Pattern, tmp_path: Path) -> None:
    trial = TRIALS.get(pattern.id, SAME)
    began = (f"output.root_uri={tmp_path}", *trial.before)
    failed(tmp_path, of(*began), saved=trial.saved)
    assert continues(of(*began), run_id="")  # the same command
    for override in trial.overrides:
        changed = together(override, trial.overrides)
        fields = {one.partition("=")[0] for one in changed}
        with_it = of(*(one for one in began if one.partition("=")[0] not in fields), *changed)
        assert continues(with_it, run_id="mine"), override
        if trial.saved:
            require_taken(of(*began), with_it)
    if trial.fresh:
        assert not continues(of(*began), run_id="", fresh=True)


@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if trial.starts_over])
def test_what_starts_over_does_so(name: str, tmp_path: Path) -> None:
    trial, root = TRIALS[name], f"output.root_uri={tmp_path}/a"
    failed(tmp_path / "a", of(root), saved=trial.saved)
    for override in trial.starts_over:
        changed = override.replace("ELSEWHERE", f"{tmp_path}/b")
        assert not continues(of(*([] if changed.startswith("output") else [root]), changed), run_id="")


def together(override: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """An override with those that go with it."""
    groups = (("cluster.scheduling_strategy", "cluster.accelerator", "cluster.max_wait"), ("checkpoint.mirror_uri",))
    for group in groups:
        if override.startswith(group):
            return tuple(one for one in others if one.startswith(group))
    return (override,)


def failed(root: Path, config: RunConfig, *, saved: bool) -> None:
    """A run of that file that has failed, as `vlmpipe run` and its first step leave it."""
    run = open_run(config, ["digits.yaml"], run_id="mine")
    run.close(1)
    paths = RunPaths(run_id="mine", root_uri=str(root))
    write_record(LocalStorage(run.folder), "run.json", config.to_run_json(paths))
    if saved:
        LocalStorage(run.folder).write("checkpoints/0001-00000004-ab/COMMIT", b"{}")


def continues(config: RunConfig, *, run_id: str, fresh: bool = False) -> bool:
    """Whether a command goes on with the failed run, up to the first step."""
    run = open_run(config, ["digits.yaml"], run_id=run_id, fresh=fresh)
    run.close(1)
    if run.earlier:
        require_resumable(config, RunPaths(run_id="mine", root_uri=str(run.folder.parents[1])))
    return run.earlier is not None


def require_taken(before: RunConfig, after: RunConfig) -> None:
    """By the rule of training itself."""
    paths = RunPaths(run_id="mine", root_uri="/r")
    saved, expected = (
        record(settings=settings_of(JobConfig.model_validate(config.to_run_json(paths))), checkpoint_format="dcp")
        for config in (before, after)
    )
    require_same_run(Checkpoint("0001", saved), expected)


def test_a_setting_that_is_not_taken_would_fail_here(tmp_path: Path) -> None:
    root = f"output.root_uri={tmp_path}"
    failed(tmp_path, of(root), saved=True)
    with pytest.raises(ConfigError, match=r"train\.global_batch_size"):
        continues(of(root, "train.global_batch_size=8"), run_id="mine")
    with pytest.raises(ConfigError, match=r"train\.global_batch_size"):
        require_taken(of(root), of(root, "train.global_batch_size=8"))
