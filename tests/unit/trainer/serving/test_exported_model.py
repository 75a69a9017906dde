"""The GPUs that an export is put on, and the precision it is loaded in."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.paths import ROOT
from tests.support.trainer.few_layers import MODELS
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.checkpoint.staging import EXPORT_PREFIX, LOAD_PREFIX, PREFIX, sweep_staging
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed import process
from vlmpipe.trainer.distributed.process import own_devices
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.models.layers.bf16 import cast_to_bf16
from vlmpipe.trainer.models.llava.family import LlavaFamily
from vlmpipe.trainer.serving import exported_model
from vlmpipe.trainer.serving.exported_model import roomy_devices

FAMILIES = {"llava": LlavaFamily(), "qwen2_5_vl": HfFamily(), "qwen3_vl": HfFamily()}
MODEL = nn.Linear(1024, 1024, bias=False)  # 4 MiB


@pytest.fixture
def gpus_of_4_mib(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=4 << 20))
    return [torch.device("cuda", number) for number in (2, 3, 4)]


def test_a_model_gets_the_gpus_that_it_needs(gpus_of_4_mib: list[torch.device]) -> None:
    assert roomy_devices(MODEL, gpus_of_4_mib) == gpus_of_4_mib[:2]
    assert roomy_devices(MODEL.bfloat16(), gpus_of_4_mib) == gpus_of_4_mib[:1]
    MODEL.float()


def test_too_few_gpus_are_an_error_with_the_way_out(gpus_of_4_mib: list[torch.device]) -> None:
    with pytest.raises(ConfigError, match="processes_per_replica"):
        roomy_devices(MODEL.double(), gpus_of_4_mib[:2])
    MODEL.float()


@pytest.mark.parametrize(("ranks", "rank", "expected"), [(2, 1, [4, 5, 6, 7]), (8, 3, [3]), (3, 2, [4, 5])])
def test_ranks_of_a_node_share_its_gpus(
    ranks: int, rank: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    first = torch.device("cuda", rank * process.gpus_each())
    assert [device.index for device in own_devices(first)] == expected


def test_another_processs_start_leaves_an_export_that_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start sweeps away what killed processes left in the folder of temporary files."""
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "one", "root_uri": str(tmp_path)}})
    export = Path(job.run.run_uri, "export")
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(b"weights")
    read: list[bytes] = []

    def load(folder: Path, _dtype: torch.dtype) -> nn.Module:
        assert sweep_staging() == 0
        read.append((folder / "model.safetensors").read_bytes())
        return MODEL

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(exported_model, "family_of", lambda _model: SimpleNamespace(load=load))
    monkeypatch.setattr(exported_model, "require_whole_export", lambda _run: None)
    exported_model.load_export(job, torch.device("cpu"))
    assert read == [b"weights"] and not list(tmp_path.glob("vlmpipe-*"))


def test_no_other_folder_has_a_name_that_is_swept_away() -> None:
    """Such a folder must be locked, which staging.py alone does."""
    names = re.compile("|".join((PREFIX, LOAD_PREFIX, EXPORT_PREFIX)))
    packages = ("trainer", "vlmpipe", "components", "pipelines")
    files = {
        path for package in packages for path in (ROOT / package).rglob("*.py") if names.search(path.read_text("utf-8"))
    }
    assert {path.name for path in files} == {"staging.py"}


@pytest.mark.parametrize("kind", MODELS)
def test_weights_that_are_loaded_in_bf16_are_those_cast_to_bf16(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    MODELS[kind]().save_pretrained(tmp_path)
    family = FAMILIES[kind]
    expected, found = family.load(tmp_path), family.load(tmp_path, torch.bfloat16)
    assert {one.dtype for one in expected.parameters()} == {torch.float32}
    cast_to_bf16(expected.parameters())
    for kind_of in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(expected, kind_of)(), getattr(found, kind_of)(), strict=True)
        assert all(one == other and torch.equal(a, b) and a.dtype == b.dtype for (one, a), (other, b) in pairs)
