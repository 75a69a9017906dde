"""Published weights that are read where they lie: in a bucket and on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save, save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.hub import COMMIT, FakeHub, Repository, running_hub
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.models.hf_native import weight_files as files_of
from vlmpipe.trainer.models.hf_native.weight_files import READ, RangedFile, Source, read_in_passing, weight_files
from vlmpipe.trainer.models.hf_native.weights import PretrainedModel, StoredWeights
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.file_sums import files_below

TENSORS = {
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    **{name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in READ.items()},
}
WEIGHTS = {f"layer.{number}": torch.randn(40, 30, generator=torch.Generator().manual_seed(number)) for number in (0, 1)}
SHARDS = {f"model-0000{number + 1}-of-00002.safetensors": f"layer.{number}" for number in (0, 1)}
INDEX = json.dumps({"weight_map": {name: shard for shard, name in SHARDS.items()}}).encode()
FILES = {
    "config.json": b"{}",
    SAFE_WEIGHTS_INDEX_NAME: INDEX,
    **{shard: save({name: WEIGHTS[name].bfloat16()}) for shard, name in SHARDS.items()},
}
MODEL = PretrainedModel(None)
BUCKET, HUB = WeightsConfig(weights="gs://bucket/model"), WeightsConfig(weights="org/model")


class InMemory:
    """A file whose requests are counted."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()
        self.source = Source("memory", len(data), self.read)

    def read(self, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        return self.data[start:end]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
        for name, data in FILES.items():
            open_storage(BUCKET.weights).write(name, data)
        yield server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(org__model=Repository(tuple(FILES), contents=FILES)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield server


def read_all(part: WeightsConfig) -> dict[str, Tensor]:
    stored = StoredWeights(part, MODEL)
    return {name: stored.read(name) for name in WEIGHTS}


def are_the_published(found: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in WEIGHTS.items())


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_every_tensor_is_the_one_that_was_saved(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_of, "PIECE_BYTES", piece_bytes)
    file = RangedFile(InMemory(save(TENSORS, {"format": "pt"})).source, {})
    assert set(file.keys()) == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found, part = file.get_tensor(name), file.get_slice(name)
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float())
        assert part.get_shape() == list(tensor.shape)
    assert torch.equal(file.get_slice("F32")[1:2], TENSORS["F32"][1:2])


def test_a_tensor_is_asked_for_alone_and_a_shape_not_at_all() -> None:
    source = InMemory(save(WEIGHTS))
    file = RangedFile(source.source, {})
    assert file.get_slice("layer.0").get_shape() == [40, 30]
    read = sum(end - start for start, end in source.asked)
    assert read == len(source.data) - sum(weight.nbytes for weight in WEIGHTS.values()), "the header"
    file.get_tensor("layer.1")
    assert sum(end - start for start, end in source.asked) == read + WEIGHTS["layer.1"].nbytes


def with_header(change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    data = save({"a": torch.ones(2, 2)})
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + data[8 + size :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234",
        b"\xff" * 100,
        (90).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{[" + bytes(16),
        (2).to_bytes(8, "little") + b"[]" + bytes(16),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        with_header(lambda header: header["a"].update(dtype="F5")),
        with_header(lambda header: header["a"].update(shape=[2, 3])),
        with_header(lambda header: header["a"].update(shape=[-2, -2])),
        with_header(lambda header: header["a"].update(shape="", data_offsets=[0, 4])),
        with_header(lambda header: header["a"].update(data_offsets=[8, 24])),
        with_header(lambda header: header["a"].update(data_offsets=[16, 0])),
        with_header(lambda header: header["a"].update(data_offsets=[0])),
        with_header(lambda header: header["a"].pop("shape")),
        with_header(lambda header: header.update(a=None)),  # type: ignore[arg-type]
    ],
)
def test_a_damaged_file_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^memory:? "):
        RangedFile(InMemory(data).source, {}).get_tensor("a")


def test_a_tensor_that_is_read_again_has_the_bytes_of_its_first_reading() -> None:
    source, sums = InMemory(save(WEIGHTS)), dict[tuple[str, str], int]()
    RangedFile(source.source, sums).get_tensor("layer.1")
    source.data = source.data[:-1] + b"?"
    other = RangedFile(source.source, sums)
    other.get_tensor("layer.0")
    with pytest.raises(DataError, match=r"layer\.1 has other bytes than when it was first read"):
        other.get_tensor("layer.1")


def test_weights_in_a_bucket_are_read_by_ranges_and_only_within_the_block(bucket: FakeGcs, tmp_path: Path) -> None:
    with read_in_passing():
        assert are_the_published(read_all(BUCKET))
        assert not [name for name in files_below(tmp_path) if name.endswith(".safetensors")]
    sizes = [len(data) for name, data in FILES.items() if name.endswith(".safetensors")]
    assert sum(size for name, size in bucket.downloads if name.endswith(".safetensors")) == sum(sizes)
    assert are_the_published(read_all(BUCKET)), "a training's way"
    assert len([name for name in files_below(tmp_path) if name.endswith(".safetensors")]) == len(sizes)


def test_a_file_that_is_replaced_meanwhile_is_refused(bucket: FakeGcs) -> None:
    with read_in_passing():
        stored = StoredWeights(BUCKET, MODEL)
        stored.read("layer.0")
        shard = next(iter(SHARDS))
        open_storage(BUCKET.weights).write(shard, FILES[shard])
        with pytest.raises(DataError, match="was replaced while it was read"):
            stored.read("layer.0")


def test_weights_on_the_hub_are_read_by_ranges_of_one_commit(hub: FakeHub, tmp_path: Path) -> None:
    with read_in_passing():
        assert are_the_published(read_all(HUB))
    assert not [name for name in files_below(tmp_path) if name.endswith(".safetensors")]
    assert hub.sent_bytes == sum(len(data) for name, data in FILES.items() if name.endswith(".safetensors"))
    read = [request for request in hub.requests if request.endswith(tuple(SHARDS))]
    assert read and all(f"/resolve/{COMMIT}/" in request for request in read), "also where main moves on"


def test_a_file_of_the_hub_that_is_on_this_machine_is_read_there(hub: FakeHub, tmp_path: Path) -> None:
    assert are_the_published(read_all(HUB))
    with read_in_passing():
        assert are_the_published(read_all(HUB))
    assert hub.sent_bytes == 0


def test_a_hub_that_cannot_give_ranges_is_said_in_words(hub: FakeHub) -> None:
    hub.gives_ranges = False
    with read_in_passing(), pytest.raises(DataError, match=rf"^org/model@{COMMIT}/model-00001.*: bytes 0 to 8"):
        read_all(HUB)


def test_a_hub_out_of_reach_is_said_in_words(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/model"] = Repository(tuple(FILES), contents=FILES, readers=("somebody",), gated=True)
    with read_in_passing(), pytest.raises(UserError, match="gated") as caught:
        weight_files(HUB).has(SAFE_WEIGHTS_NAME)
    assert caught.value.code == ExitCode.NO_PERMISSION


def test_a_folder_of_this_machine_is_read_in_place(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / SAFE_WEIGHTS_NAME)
    with read_in_passing():
        stored = StoredWeights(WeightsConfig(weights=str(tmp_path)), MODEL)
        assert all(torch.equal(stored.read(name), weight) for name, weight in WEIGHTS.items())
