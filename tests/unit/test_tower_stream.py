"""A tower on a stream of its own: what is ordered where, and before what; combinations that cannot work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.tiny_runs import TINY, merged
from pipelines.config import parse_run_config
from trainer.batches import RowBatch
from trainer.errors import ConfigError
from trainer.strategies.tower_stream import TowerStream, micro_batches
from trainer.train_config import TrainConfig

CPU = torch.device("cpu")
TRAIN = {"global_batch_rows": 8, "optimizer": {"learning_rate": 1e-3}}


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


def batch(number: int) -> RowBatch:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    return RowBatch(ids, ids, ids[0, :1], ids[0, :1], images=torch.tensor([float(number)]))


def test_the_next_micro_batch_is_encoded_on_its_own_stream_before_this_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    stream = TowerStream(Tower(device), CPU, "fp32")
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
    config = TrainConfig.model_validate({**TRAIN, "tower_stream": asked})
    (arguments,) = micro_batches(config, nn.Linear(1, 1), CPU)([batch(1)])
    assert arguments["images"].item() == 1 and "encoded" not in arguments


@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp"])
def test_strategies_whose_ranks_wait_in_the_tower_are_refused(strategy: str) -> None:
    degrees = {"tp": {"tensor_parallel": 2}, "pp": {"pipeline_parallel": 2}}.get(strategy, {})
    with pytest.raises(ValueError, match=f"tower_stream does not work with strategy {strategy}"):
        TrainConfig.model_validate({**TRAIN, **degrees, "strategy": strategy, "tower_stream": True})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"features.cache": "on"}, "does not run: features.cache is on"),
        ({"model.freeze": [], "features.cache": "off"}, "is trained"),
    ],
)
def test_a_tower_that_cannot_run_ahead_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.tower_stream.*" + why):
        parse_run_config(merged(TINY, {"train.tower_stream": True, **changes}), "a run file")
