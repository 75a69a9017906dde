"""Stored weights, read one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.drivers.weigh_start import CountingFile
from tests.support.trainer.measure_memory import Scales
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.models.hf_native import weight_files
from vlmpipe.trainer.models.hf_native.weights import HEAD, PretrainedModel, StoredWeights

EMBEDDING = "embed.weight"


@pytest.mark.parametrize("stored_type", [torch.float32, torch.bfloat16])
def test_an_embedding_gets_rows_without_a_second_copy(
    stored_type: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are the mean of all. It is the largest weight: at the start nothing else is read that needs more."""
    weight = torch.randn(40_000, 16, generator=torch.Generator().manual_seed(0)).to(stored_type)
    save_file({EMBEDDING: weight}, tmp_path / "model.safetensors")
    stored = StoredWeights(WeightsConfig(weights=str(tmp_path)), PretrainedModel(None, embedding=EMBEDDING), 40_003)
    monkeypatch.setattr(weight_files, "safe_open", CountingFile)
    with Scales() as scales:
        found = stored.read(EMBEDDING)
    assert scales.peak_bytes < 1.2 * found.nbytes
    assert found.dtype == torch.float32 and torch.equal(found[:40_000], weight.float())
    mean = weight.double().mean(dim=0).float()
    assert len(found) == 40_003 and all(torch.allclose(row, mean, atol=1e-7) for row in found[40_000:])
    assert torch.equal(stored.read(HEAD), found), "a head that is not stored is the embedding"
