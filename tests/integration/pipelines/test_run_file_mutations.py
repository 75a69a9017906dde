"""`check`, `plan`, `run` and `submit` agree: what passes `check` does not fail later for a reason in the run file.

`make fuzz-config N=1000` tries more run files, other ones each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.fakes.gcs.server import FakeGcs
from tests.support.fuzz import examples, fuzzed
from tests.support.pipelines import golden_pipelines
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.run_file_mutations import changes, mutated
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.runs import ends_of_ranks
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.pipelines.check import check_run
from vlmpipe.pipelines.submit import submit_run
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.sweep import require_runnable
from vlmpipe.platforms.base import Submitted
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.progress import Progress

EXAMPLES = examples(25 if WHOLE else 6)
TRAINED = max(2, EXAMPLES // 10)  # that also prepare data and take a step
GCP = {"gcp.project": "my-project", "gcp.pipeline_root": "gs://example-bucket/vlmpipe"}
SHIPPED = ("digits", "llava-7b-lora", "llava-7b-zero2-spot", "llava-13b-fsdp", "qwen2-5-vl-3b-lora")
STEP = {"train.max_steps": 1, "train.epochs": 1, "data.max_samples": 60, "cluster.replica_count": 1}
OF_TRAINING = ("model", "data", "features", "train", "checkpoint", "evaluate")

short = fuzzed(EXAMPLES)


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder to run in, buckets, and no hub: what is in the cache of this machine must not matter."""
    work = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch, FakeGcs(buckets=["example-bucket", "bucket"]) as buckets:
        patch.chdir(work)
        patch.setenv("STORAGE_EMULATOR_HOST", buckets.endpoint)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def bases() -> dict[str, dict[str, Any]]:
    shipped = {
        path.stem: merged(load_shipped(path).to_dict(), GCP)
        for path in golden_pipelines.RUN_FILES
        if path.stem in SHIPPED
    }
    return {"here": TINY, **shipped}


@dataclass(frozen=True)
class Verdicts:
    """Why each command refuses a run file; empty where it does not."""

    check: str
    plan: str
    run: str
    submit: str

    def agree(self) -> bool:
        later = (self.plan, self.run, self.submit)
        return any(later) if self.check else not any(later)


def verdicts(content: dict[str, Any], config: RunConfig) -> Verdicts:
    findings = check_run(config)
    failed = [f"{finding.subject}: {finding.text}" for finding in findings if finding.state == "failed"]
    (vertex,) = (finding for finding in findings if finding.subject == "vertex")
    is_here = vertex.state == "unchecked"
    return Verdicts(
        check="; ".join(failed),
        plan=refusal(lambda: _require_not_red(config, is_here=is_here)),
        run=refusal(lambda: _begin(content, config, "local" if is_here else "vertex")),
        submit="" if is_here else refusal(lambda: _submit(config)),
    )


def refusal(act: Callable[[], object]) -> str:
    """Why it is refused. Any other error than one for users is a traceback for them, and fails the test."""
    try:
        act()
    except UserError as error:
        return error.text()
    return ""


def _require_not_red(config: RunConfig, *, is_here: bool) -> None:
    plan = plan_run(config)
    # The memory of a machine on Vertex AI does not matter to a run here.
    if wrong := [] if is_here else plan.errors:
        raise UserError("; ".join(wrong))


def _begin(content: dict[str, Any], config: RunConfig, target: Any) -> None:
    """What `vlmpipe run` and the first step of a pipeline check."""
    require_runnable(config)
    resolve(
        json.dumps(content), compiled_settings(config, target, platform_of(target).root_uri(config)), run_id="mutated"
    )


def _submit(config: RunConfig) -> Submitted:
    return submit_run(config, source=["run.yaml"], run_id="", force=False, yes=True, dry_run=True, ask=None)


CPUS = {"cluster.accelerator_type": "", "cluster.accelerator_count": 0}
# Each once passed `check` and failed later; more are in tests/unit/vlmpipe/planner/test_model_architecture.py.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "TPU machines": ("llava-7b-lora", {"cluster.machine_type": "ct5lp-hightpu-4t", **CPUS}),
    "a region without these GPUs": ("llava-7b-lora", {"gcp.location": "us-central9"}),
    "memory": ("llava-13b-fsdp", {"train.strategy": "zero1"}),
    "a file of prices that is not there": ("llava-7b-lora", {"plan.prices_file": "nowhere.yaml"}),
    "a layer that the tower has not": ("digits", {"model.feature_layer": 7}),
    "no class token to drop": ("digits", {"model.feature_select": "drop_cls"}),
    "channels": ("digits", {"model.tower.config.num_channels": 4}),
    "weights without numbers": ("digits", {"model.tower.config.intermediate_size": 0}),
    "widths of heads that do not fit": ("digits", {"model.language_model.config.head_dim": 3}),
    "a tokenizer too small for bytes": ("digits", {"model.tokenizer": "train:257"}),
    "a template that a trained tokenizer has not": ("digits", {"data.chat_template": "native"}),
    "a tower's other image size": ("digits", {"model.image_size": 100}),
    "more heads for keys than for queries": ("digits", {"model.language_model.config.num_key_value_heads": 8}),
}
# These say what is wrong when they are read, so no command goes on with them.
UNREADABLE: dict[str, Any] = {
    "train.epochs": 10**20,
    "output.root_uri": "hdfs://host/runs",
    "data.source": "http://host/set.json",
    "register.registry": "ftp://host",
    "data.validation_fraction": 0,
    "gcp.location": "us-centrall1",
}


@pytest.mark.parametrize("name", chosen(REFUSED, lambda name: name != "memory"))
def test_every_command_refuses_it(bases: dict[str, dict[str, Any]], name: str) -> None:
    base, change = REFUSED[name]
    content = mutated(bases[base], change)
    found = verdicts(content, parse_run_config(content, "run file"))
    assert all((found.check, found.plan, found.run, found.submit)), found


@pytest.mark.parametrize("field", UNREADABLE)
def test_no_command_gets_to_see_it(bases: dict[str, dict[str, Any]], field: str) -> None:
    with pytest.raises(UserError, match=field.replace(".", r"\.")):
        parse_run_config(mutated(bases["digits"], {field: UNREADABLE[field]}), "run file")


def test_reducers_with_less_bandwidth_than_the_nodes_are_a_warning_everywhere(bases: dict[str, dict[str, Any]]) -> None:
    content = mutated(bases["llava-7b-zero2-spot"], {"cluster.reduction_server.replica_count": 2})
    config = parse_run_config(content, "run file")
    assert any(finding.state == "warning" and "VP215" in finding.text for finding in check_run(config))
    plan = plan_run(config)
    assert (plan.state, plan.doubts[0]) == ("amber", "see VP215")
    assert _submit(config).spending.state == "amber"


@pytest.mark.timeout(60 + 10 * EXAMPLES)
@short
@given(name=st.sampled_from(["here", *SHIPPED]), change=changes())
def test_all_commands_agree(bases: dict[str, dict[str, Any]], name: str, change: dict[str, Any]) -> None:
    content = mutated(bases[name], change)
    try:
        config = parse_run_config(content, "run file")
    except UserError as error:
        assert error.code == ExitCode.CONFIG
        event("not read")
        return
    found = verdicts(content, config)
    event("check refuses it" if found.check else "check takes it")
    assert found.agree(), (name, change, found)


@pytest.mark.timeout(60 + 30 * TRAINED)
@settings(short, max_examples=TRAINED * 3)  # about a third of them pass `check`
@given(change=changes(OF_TRAINING))
def test_what_passes_check_takes_a_step(tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any]) -> None:
    root = tmp_path_factory.mktemp("root")
    content = merged(mutated(TINY, change), STEP | {"output.root_uri": str(root)})
    try:
        config = parse_run_config(content, "run file")
    except UserError:
        return
    # A machine on Vertex AI without the memory for it is a warning: this one, whose memory nobody knows, may have it.
    doubted = any(one.state == "failed" or (one.subject, one.state) == ("plan", "warning") for one in check_run(config))
    if doubted or config.cluster.world_size > 2:
        return
    take_a_step(content, config, root)


def take_a_step(content: dict[str, Any], config: RunConfig, root: Path) -> None:
    require_runnable(config)
    made = resolve(json.dumps(content), compiled_settings(config, "local", str(root)), run_id="mutated")
    job = JobConfig.load(f"{made.run_uri}/run.json")
    try:
        pointers, _ = prepare_run(job, Progress(made.run_uri, "prepare-data", quiet=True))
    except UserError as error:
        assert error.code == ExitCode.DATA, error.text()  # samples too long for a sequence, too few to hold some out
        return
    modules = ["vlmpipe.trainer.feature_cache.encode"] if pointers.features == "encode" else []
    for module in [*modules, "vlmpipe.trainer.train"]:
        arguments = ["--config", f"{made.run_uri}/run.json"]
        codes, said = ends_of_ranks(module, arguments, processes=config.cluster.world_size, timeout_s=120)
        assert not any(codes), said[0][-3000:]
