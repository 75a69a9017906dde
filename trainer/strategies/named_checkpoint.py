"""Checkpoints of all strategies, in torch's distributed checkpoint format (DCP).

Tensors are keyed by parameter name, with the place of each block, so any strategy loads them on any number of ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from vlmpipe.trainer.strategies.base import SavedFiles
from vlmpipe.trainer.strategies.tensor_pieces import with_pieces

FORMAT = "dcp"
METADATA_FILE = ".metadata"  # what is where, a pickle
EMA = "ema"  # entry of a state, beside "model" and "optimizer"


def host_stager(*, on_gpu: bool) -> StateDictStager:
    """A stager that copies nested state into host memory and reuses its buffers.

    Not torch's DefaultStager, which in torch 2.11 serves once: it closes this one, which it holds, after each copy.
    """
    return StateDictStager(pin_memory=on_gpu, share_memory=False)  # /dev/shm is small in containers


def write_state(state: Mapping[str, object], folder: Path, group: ProcessGroup) -> None:
    """Write this rank's part of a nested state. Collective."""
    with _plain_errors():
        dcp.save(
            with_pieces(state),
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True),
            process_group=group,
        )


def metadata_of(files: SavedFiles) -> Metadata:
    """Names, shapes and places of a checkpoint's tensors."""
    metadata: Metadata = pickle.loads(files.read(METADATA_FILE))
    return metadata


def ranges_of(target: Mapping[str, object], metadata: Metadata, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
    """The items that DCP's own plan for this rank's `target` asks for, by file. See `Strategy.reads`."""
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(with_pieces(target), metadata, is_coordinator=False)
    ranges = {METADATA_FILE: [(0, files.sizes_bytes[METADATA_FILE])]}
    for item in planner.create_local_plan().items:
        place = metadata.storage_data[item.storage_index]
        ranges.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
    return ranges


def load_state(target: Mapping[str, object], reader: dcp.FileSystemReader) -> None:
    """Fill the tensors of a nested state. Collective."""
    with _plain_errors():
        dcp.load(with_pieces(target), storage_reader=reader)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first failing rank's own error on every rank: DCP's wrapper is not an Exception."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None
