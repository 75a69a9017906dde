"""Reading the tensors of DeepSpeed's files, whose other objects are not made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from vlmpipe.trainer.checkpoint import weight_reader


class _MemberOfPython3110:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an Enum: by getattr on its class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, "weights")


def test_a_member_of_an_enum_is_passed_over_in_either_way_of_pickling_it(tmp_path: Path) -> None:
    file = tmp_path / "partition.pt"
    torch.save({"old": _MemberOfPython3110(), "new": ZeroStageEnum.weights, "weights": torch.arange(3)}, file)
    read = weight_reader._mapped(file)
    assert read["weights"].tolist() == [0, 1, 2]
    assert {type(read[key]) for key in ("old", "new")} == {weight_reader._Ignored}  # getattr was not called
