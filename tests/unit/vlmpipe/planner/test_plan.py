"""The plan as a whole: what it answers, what it leaves open, and what the numbers say of strategies."""

from __future__ import annotations

import dataclasses
import json
import socket
import time

import pytest

from tests.support.paths import ROOT
from tests.support.planner.plans import PLANNED_BY_TESTS
from tests.support.short_form import WHOLE
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.cli.views.plan import headline
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner import model_architecture as architectures
from vlmpipe.planner.memory.activations import activations
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB, Memory, fullest, training_phases
from vlmpipe.planner.model_architecture import Architecture, architecture
from vlmpipe.planner.parallel_layout import STRATEGIES, make_layout
from vlmpipe.planner.plan import Plan, described_machine, plan_run
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

SEVEN_B = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"


def planned(*overrides: str) -> Plan:
    return plan_run(load_run_file(SEVEN_B, overrides))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_the_shipped_run_files_have_no_error(plan: Plan) -> None:
    paths = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if WHOLE or path.stem in PLANNED_BY_TESTS]
    others = [plan_run(load_run_file(path)) for path in paths]
    assert [one.errors for one in (plan, *others)] == [[]] * (len(others) + 1)


def test_a_complete_plan_of_a_spot_run_is_green_and_has_a_price() -> None:
    plan = planned("train.checkpoint_every_steps=50")
    assert plan.state == "green", "with 100 steps a tenth of it is lost to preemptions"
    assert plan.cost is not None and plan.cost.usd is not None and plan.cost.usd > 0
    assert plan.memory is not None and plan.memory.fits


def test_a_described_machine_takes_the_place_of_the_catalogues() -> None:
    catalog = load_catalog()
    fast = described_machine(load_run_file(SEVEN_B, ["plan.machine.nic_gbps=3200"]), catalog)
    own = {"cluster.machine_type": "dgx", "plan.machine.nic_gbps": 3200, "plan.machine.memory_gib": 2048}
    known = load_run_file(SEVEN_B, [f"{name}={value}" for name, value in own.items()])
    unknown = load_run_file(SEVEN_B, ["cluster.machine_type=dgx", "plan.machine.nic_gbps=3200"])
    assert fast is not None and (fast.nic_gbps, fast.memory_gib) == (3200, 1360)
    found = described_machine(known, catalog)
    assert found is not None and (found.machine_type, found.nic_gbps, found.memory_gib) == ("dgx", 3200, 2048)
    assert described_machine(unknown, catalog) is None


def test_a_machine_that_the_catalogue_does_not_have_is_planned_by_what_the_run_file_says() -> None:
    found = planned("cluster.machine_type=my-box", "plan.machine.nic_gbps=100", "plan.machine.memory_gib=600")
    assert found.memory and found.memory.fits and found.time and found.time.train_hours
    assert found.features_cache and found.features_cache.encode_gpu_hours


def test_a_job_that_the_run_leaves_out_is_not_among_its_machines(plan: Plan) -> None:
    cached = planned("features.cache=on")
    assert plan.jobs.keys() == {"train", "evaluate"}, "one epoch is not worth a cache"
    assert cached.jobs.keys() == {"cache_features", "train", "evaluate"}


def test_sizes_are_those_of_the_published_model(plan: Plan) -> None:
    assert plan.model is not None
    parts = plan.model.shape.parameters
    assert parts["language_layers"] + parts["embedding"] + parts["head"] == 6_738_415_616  # vicuna-7b-v1.5
    assert parts["projector"] == 1024 * 4096 + 4096 + 4096 * 4096 + 4096


def test_a_run_that_does_not_fit_is_red_and_the_suggested_settings_fit() -> None:
    plan = planned("train.strategy=ddp")
    assert plan.state == "red" and plan.memory is not None and not plan.memory.fits
    assert plan.memory.nearest
    for setting in plan.memory.nearest:
        change = {"train.strategy": "ddp", **setting.change}
        again = planned(*(f"{field}={json.dumps(value)}" for field, value in change.items()))
        assert again.memory is not None and again.memory.fits
        assert again.memory.total_bytes == setting.total_bytes


def test_an_impossible_machine_is_red_and_an_unknown_one_leaves_the_rest_open() -> None:
    impossible = planned("cluster.machine_type=n1-standard-8")
    assert impossible.state == "red" and any("n1-standard-8" in error for error in impossible.errors)
    unknown = planned("cluster.machine_type=z9-giant-8g")
    assert unknown.memory is None and "z9-giant-8g" in " ".join(unknown.notes)


@pytest.mark.parametrize(
    ("taken", "state", "said"),
    [
        (90, "green", ""),
        (96, "amber", "only 0.0 GiB of memory to spare"),
        (101, "amber", "it takes 1.0% more memory than there is, within the error of the estimate, 2%"),
        (103, "red", "does not fit"),
    ],
)
def test_a_plan_within_the_error_of_the_estimate_is_amber(taken: int, state: str, said: str) -> None:
    memory = Memory("NVIDIA_A100_80GB", 100, (MemoryPart("weights", taken),), "backward")
    plan = Plan("one", (), {}, memory=memory, beside_training=())
    assert plan.state == state
    first = {"green": "Fits", "amber": "Fits" if taken < 100 else "May fit", "red": "Does not fit"}[state]
    assert headline(plan.as_dict()).startswith(f"{first}: ")
    assert said in " ".join([*plan.errors, *plan.doubts])


@pytest.mark.parametrize(
    ("change", "field"),
    [("plan.sample_images=20", "max_images_per_sequence"), ("plan.sample_tokens=9000", "sequence_length")],
)
def test_a_mean_sample_that_no_sequence_holds_is_refused(change: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_run_file(SEVEN_B, [change])


def test_float8_on_a_gpu_without_it_is_red_and_says_which_have_it() -> None:
    plan = planned("train.strategy=fsdp", "train.float8=tensorwise", "cluster.reduction_server=null")
    (error,) = plan.errors
    assert "NVIDIA_A100_80GB, of compute capability 8.0: use one of NVIDIA_L4" in error
    assert error.endswith("or train.float8=none")


def test_float8_on_a_gpu_without_it_is_red_where_the_models_sizes_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(config: RunConfig) -> Architecture:
        raise UserError("the model's files are not here", code=ExitCode.UNAVAILABLE)

    monkeypatch.setattr("vlmpipe.planner.plan.architecture", absent)
    plan = planned("train.strategy=fsdp", "train.float8=tensorwise", "cluster.reduction_server=null")
    assert plan.model is None
    assert ["train.float8 tensorwise does not work" in error for error in plan.errors] == [True]


def test_a_plan_says_what_train_compile_came_to(plan: Plan) -> None:
    assert plan.as_dict()["compile"]["state"] == "on", "at most 4,096 tokens in a micro-batch"
    assert planned("train.compile=off").as_dict()["compile"]["state"] == "off"
    assert "zero3" in planned("train.strategy=zero3", "cluster.reduction_server=null").as_dict()["compile"]["why"]


def test_without_a_number_of_samples_the_price_is_open_and_a_note_says_what_to_give() -> None:
    plan = planned("plan.samples=0")
    assert plan.state == "amber" and plan.doubts == ["the amount of data is unknown"]
    assert plan.cost is not None and plan.cost.usd is None
    assert plan.time is not None and plan.time.step_s and plan.time.train_hours is None
    assert any("plan.samples" in note for note in plan.notes)


def test_a_plan_says_that_a_relevance_module_needs_no_sharding() -> None:
    stages = load_run_file(ROOT / "configs/arr-coc.yaml").stage_runs()
    said = "Only the relevance module learns, 11,396 parameters: sharding and a Reduction Server gain nothing"
    found = {name: [note for note in plan_run(run).notes if note.startswith(said)] for name, run in stages.items()}
    assert [len(found["base"]), len(found["relevance"])] == [0, 1]


@pytest.mark.parametrize("listens", [True, False], ids=["no answer", "refused"])
def test_an_unreachable_hub_is_reported_at_once_and_the_rest_is_planned(
    listens: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(architectures, "HUB_TIMEOUT_S", 0.2)
    asked = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections by its queue, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if not listens:
            server.close()
        plan = planned("model.tower.weights=nobody/has-this-tower", "model.tower.revision=")
    assert time.monotonic() - asked < 5, "the client's own retries take half a minute and more"
    assert not caplog.records
    assert plan.memory is None and plan.jobs and plan.state == "amber"
    assert plan.doubts == ["memory, time and cost are unknown"]
    assert any("nobody/has-this-tower" in note and "not reachable" in note for note in plan.notes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_never_take_more_memory_of_each(strategy: str) -> None:
    config = load_run_file(SEVEN_B)
    model = architecture(config)
    held = activations(config.model_copy(update={"model": model.model}), model.shape)

    def total(nodes: int) -> int:
        parallel = {"tp": (8, 1), "pp": (1, 4), "tp+pp+dp": (4, 2)}.get(strategy, (1, 1))
        layout = make_layout(strategy, nodes, 8, tensor_parallel=parallel[0], pipeline_parallel=parallel[1])
        _, parts = fullest(
            training_phases(model.shape, layout, held, cached=False, precision="bf16", passes=2, checkpointing=True)
        )
        return sum(part.bytes for part in parts)

    assert total(1) >= total(2) >= total(8)


@pytest.mark.slow
def test_the_numbers_reproduce_common_guidance() -> None:
    """On machines of 8 x A100 80 GB: which of the trainer's strategies is the plainest that fits."""
    plainest: dict[tuple[str, int], str | None] = {
        ("Qwen/Qwen2.5-1.5B", 1): "ddp",
        ("Qwen/Qwen2.5-3B", 1): "ddp",
        ("lmsys/vicuna-7b-v1.5", 1): "zero2",
        ("lmsys/vicuna-13b-v1.5", 1): "zero2",
        ("01-ai/Yi-34B", 1): "fsdp",  # with 0.4 GiB to spare: amber
        ("01-ai/Yi-34B", 2): "fsdp",
        ("meta-llama/Llama-2-70b-hf", 2): None,
        ("meta-llama/Llama-2-70b-hf", 4): "fsdp",
    }
    # In the short form one model of each answer, and none that fits.
    short = (("Qwen/Qwen2.5-3B", 1), ("lmsys/vicuna-7b-v1.5", 1), ("01-ai/Yi-34B", 1), ("meta-llama/Llama-2-70b-hf", 2))
    asked = plainest if WHOLE else {case: plainest[case] for case in short}
    assert {case: _plainest(*case) for case in asked} == asked


def _plainest(language_model: str, nodes: int) -> str | None:
    catalog = load_catalog()
    for strategy in ("ddp", "zero2", "fsdp"):
        config = load_run_file(
            SEVEN_B,
            [
                f"model.language_model.weights={language_model}",
                "model.language_model.revision=",
                f"cluster.replica_count={nodes}",
                "cluster.reduction_server=null",
                f"train.strategy={strategy}",
            ],
        )
        machine, gpu = catalog.machines["a2-ultragpu-8g"], catalog.gpus["NVIDIA_A100_80GB"]
        if estimate_memory(config, architecture(config), machine, gpu, nearest=False).fits:
            return strategy
    return None


def test_the_bars_components_add_up_to_the_total(plan: Plan) -> None:
    assert plan.memory is not None
    written = plan.as_dict()["memory"]
    assert sum(part["bytes"] for part in written["parts"]) == written["total_bytes"]
    assert written["capacity_bytes"] == 80 * GIB
    assert dataclasses.is_dataclass(plan.memory)
