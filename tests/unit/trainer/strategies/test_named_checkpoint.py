"""Checkpoints whose adapters are of other layers than the model's, as after another default of `model.lora.targets`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vlmpipe.trainer.checkpoint.verified_files import union
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.strategies.named_checkpoint import metadata_of, ranges_of, require_adapters_read

Q, GATE = "model.q_proj.lora_A.default.weight", "model.in_proj_a.lora_A.default.weight"


class Saved:
    """A checkpoint in a folder."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        dcp.save(state_of(*names), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)

    @property
    def sizes_bytes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.folder.iterdir()}

    def read(self, file: str) -> memoryview:
        return memoryview((self.folder / file).read_bytes())


def state_of(*names: str) -> dict[str, object]:
    return {"model": {name: torch.ones(4, 2) for name in names}}


def test_adapters_that_a_rank_reads_are_fine_and_others_are_refused(tmp_path: Path) -> None:
    saved = Saved(tmp_path, Q, GATE, "model.projector.weight")
    metadata = metadata_of(saved)
    by_rank = [ranges_of(state_of(name), metadata, saved) for name in (Q, GATE)]  # as of two pipeline stages
    require_adapters_read(metadata, union(by_rank))
    with pytest.raises(ConfigError, match=r"holds 1 .* that the model lacks, for example model\.in_proj_a"):
        require_adapters_read(metadata, union(by_rank[:1]))


def test_a_weight_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved = Saved(tmp_path, Q)
    with pytest.raises(
        ConfigError, match=r"lacks 1 of the weights that are trained, for example model\.in_proj_a"
    ) as caught:
        ranges_of(state_of(Q, GATE), metadata_of(saved), saved)
    assert caught.value.fix.startswith("set model.lora.targets to [q_proj], those of the checkpoint; ")
