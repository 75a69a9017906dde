"""Asynchronous writing of DeepSpeed's checkpoint files. Import it after `deepspeed` has been set up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

Given = ParamSpec("Given")


class HeldFiles(CheckpointEngine):
    """DeepSpeed checkpoint engine that stages files in memory; the function that `take` returns writes them."""

    def __init__(self, stager: StateDictStager) -> None:
        super().__init__()
        self._stager = stager
        self._held: dict[str, object] = {}
        self._error: Exception | None = None

    def save(self, state_dict: object, path: str) -> None:
        self._held[path] = self._stager.stage(state_dict)

    def makedirs(self, path: str | Path, exist_ok: bool = False) -> None:
        self.written(super().makedirs)(path, exist_ok=exist_ok)

    def written(self, write: Callable[Given, None]) -> Callable[Given, None]:
        """Wrap `write` so that its error is raised later, by the function that `take` returns: raised during the save,
        it would leave the other ranks waiting in the engine's collectives."""

        def keep_error(*args: Given.args, **kwargs: Given.kwargs) -> None:
            if self._error is None:
                try:
                    write(*args, **kwargs)
                except Exception as error:
                    self._error = error

        return keep_error

    def take(self) -> Callable[[], None]:
        """Return a function that writes the staged files. Call it before the next save, which reuses their buffers."""
        held, self._held = self._held, {}
        error, self._error = self._error, None

        def write() -> None:
            if error is not None:
                raise error
            for path, state in held.items():
                torch.save(state, path)

        return write

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file. It holds DeepSpeed objects beside tensors; its checksum has been verified."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def create(self, info: CheckpointCommitInfo) -> None:
        """No-op: the commit protocol (`vlmpipe.trainer.checkpoint.commit`) decides what is a checkpoint."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True
