"""Reading the tensors of DeepSpeed's files, whose other objects are not made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from vlmpipe.trainer.checkpoint.export import weight_reader
from vlmpipe.trainer.checkpoint.manifest import sums_of_file
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles
from vlmpipe.trainer.storage.local import LocalStorage


class _MemberOfPython3110:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an Enum: by getattr on its class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, "weights")


def test_a_member_of_an_enum_is_passed_over_in_either_way_of_pickling_it(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    file = store.path("checkpoints/name/partition.pt")
    file.parent.mkdir(parents=True)
    torch.save({"old": _MemberOfPython3110(), "new": ZeroStageEnum.weights, "weights": torch.arange(9)[6:]}, file)
    files = CheckpointFiles(store, "name", {file.name: sums_of_file(file)})
    read = weight_reader._outline(files, file.name)
    place = weight_reader._Stored.of(file.name, read["weights"])
    assert weight_reader._joined(files, [place]).tolist() == [6, 7, 8]
    assert {type(read[key]) for key in ("old", "new")} == {weight_reader._Ignored}  # getattr was not called


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_with_two_names_has_the_first_and_a_frozen_one_none(frozen: bool) -> None:
    trained = {"model.adapter": torch.Size([2]), **({} if frozen else {"model.embedding": torch.Size([3, 2])})}
    saved = {"param_shapes": [trained], "shared_params": {"model.head": "model.embedding"}}
    places = weight_reader._places(saved, torch.Size.numel)
    matrix = (0, 2, torch.Size([3, 2]))
    assert places == {"adapter": (0, 0, torch.Size([2]))} | ({} if frozen else {"embedding": matrix})
