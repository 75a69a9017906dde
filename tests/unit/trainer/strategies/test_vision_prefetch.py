"""A tower on a stream of its own: what is ordered where, and before what; combinations that cannot work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.paths import ROOT
from tests.support.trainer.measure_memory import Scales, draw, packed_batch
from tests.support.trainer.memory_cases import ONLINE, ROWS, Case
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import load_run_file, parse_run_config
from vlmpipe.planner.memory.activations import largest_sequences, tower_ahead_bytes
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.vision_prefetch import VisionPrefetch, micro_batches
from vlmpipe.trainer.tracing.fake_inputs import tensors_of

CPU = torch.device("cpu")
RUN_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
TRAIN = {"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}}


class Device:
    """What a device module has of streams, strictly: work is ordered on the stream that is current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"

    def Stream(self) -> Any:
        return Stream(self, "own")

    def current_stream(self) -> Any:
        return Stream(self, self.current)

    def Event(self) -> Any:
        return Event()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Any) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        assert event.after, "an event that was never recorded is waited for"
        self.device.log.append(f"{self.name} waits for {event.after}")


class Event:
    after = ""

    def record(self, stream: Any) -> None:
        assert stream.name == "own"
        self.after = stream.device.log[-1]


class Tower(nn.Module):
    runs_frozen_tower = True

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def encode(self, images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.device.log.append(f"{self.device.current} encodes {int(images[0])}")
        return images + 100


def batch(number: int) -> PackedBatch:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    return PackedBatch(ids, ids, ids[0, :1], ids[0, :1], images=torch.tensor([float(number)]))


def test_the_next_micro_batch_is_encoded_on_its_own_stream_before_this_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    stream = VisionPrefetch(Tower(device), CPU, "fp32")
    for step in range(2):
        for number, arguments in enumerate(stream([batch(1), batch(2), batch(3)]), start=1):
            assert arguments["images"].item() == 100 + number and arguments["encoded"]
            device.log.append(f"main computes {number}")
        expected = [
            "own encodes 1", "own encodes 2", "main waits for own encodes 1", "main computes 1",
            "own encodes 3", "main waits for own encodes 2", "main computes 2",
            "main waits for own encodes 3", "main computes 3",
        ]  # fmt: skip
        assert device.log == ([] if step else ["own waits for main"]) + expected
        device.log.clear()


@pytest.mark.parametrize("asked", [True, False])
def test_a_module_without_a_frozen_tower_gets_its_images(asked: bool) -> None:
    config = TrainConfig.model_validate({**TRAIN, "overlap_vision_encoder": asked})
    (arguments,) = micro_batches(config, nn.Linear(1, 1), CPU)([batch(1)])
    assert arguments["images"].item() == 1 and "encoded" not in arguments


@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp"])
def test_strategies_whose_ranks_wait_in_the_tower_are_refused(strategy: str) -> None:
    degrees = {"tp": {"tensor_parallel": 2}, "pp": {"pipeline_parallel": 2}}.get(strategy, {})
    with pytest.raises(ValueError, match=f"overlap_vision_encoder does not work with strategy {strategy}"):
        TrainConfig.model_validate({**TRAIN, **degrees, "strategy": strategy, "overlap_vision_encoder": True})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"features.cache": "on"}, "does not run: features.cache is on"),
        ({"model.freeze": [], "features.cache": "off"}, "is trained"),
    ],
)
def test_a_tower_that_cannot_run_ahead_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.overlap_vision_encoder.*" + why):
        parse_run_config(merged(TINY, {"train.overlap_vision_encoder": True, **changes}), "a run file")


def real_peak_bytes(case: Case) -> int:
    """What a tower holds at most of one micro-batch's images, and these, weighed while it runs."""
    config = case.config(1).model
    family = family_of(config)
    with Scales() as scales:
        model = family.skeleton(config, vocabulary=case.vocabulary)
        draw(model)
        module: Any = family.training_module(config, model, cached=False).train()
        batch = packed_batch(config, replace(ROWS, label_tokens=1), case.vocabulary, cached=False)
        images = batch.images_to(CPU)
        gc.collect()
        scales.peak_bytes = before = scales.held_bytes()
        features = module.encode(**images)
    assert len(features)
    return scales.peak_bytes - before + sum(tensor.nbytes for tensor in tensors_of(images))


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_a_plan_has_what_a_tower_holds_for_the_next_micro_batch(family: str) -> None:
    case = Case("ddp", ONLINE | {"train.overlap_vision_encoder": True}, cached=False, family=family)
    config = case.config(1)
    shape = family_of(config.model).shape(config.model)
    images, _ = max(largest_sequences(config, shape))
    assert images == ROWS.images // ROWS.rows
    assert tower_ahead_bytes(config, shape) == pytest.approx(real_peak_bytes(case), rel=0.02)


@pytest.mark.parametrize(("passes", "ahead"), [(1, False), (2, True)])
def test_the_tower_is_ahead_in_steps_of_several_micro_batches_only(passes: int, ahead: bool) -> None:
    rows = 8 * 4 * passes
    config = load_run_file(
        RUN_FILE, ["train.overlap_vision_encoder=true", "features.cache=off", f"train.global_batch_size={rows}"]
    )
    catalog = load_catalog()
    machine, gpu = catalog.machines["a2-ultragpu-8g"], catalog.gpus["NVIDIA_A100_80GB"]
    memory = estimate_memory(config, architecture(config), machine, gpu, nearest=False)
    assert ("tower ahead" in {part.name for part in memory.parts}) == ahead
