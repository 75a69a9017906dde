"""Checkpoints of all strategies, in torch's distributed checkpoint format (DCP).

Tensors are keyed by parameter name, with the place of each block, so any strategy loads them on any number of ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.freeze import is_adapter
from vlmpipe.trainer.strategies.base import SavedFiles
from vlmpipe.trainer.strategies.tensor_pieces import with_pieces

FORMAT = "dcp"
METADATA_FILE = ".metadata"  # what is where, a pickle
WEIGHTS = "model."  # prefix of trained weights' names in a checkpoint
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
    """The items that DCP's own plan for this rank's `target` asks for, by file. See `Strategy.reads`.

    Raises ConfigError for a trained weight that the checkpoint lacks.
    """
    weights = target["model"]
    assert isinstance(weights, Mapping)
    if missing := sorted(name for name in weights if f"{WEIGHTS}{name}" not in metadata.state_dict_metadata):
        raise _of_other_weights(
            f"lacks {len(missing)} of the weights that are trained, for example {missing[0]}", metadata
        )
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(with_pieces(target), metadata, is_coordinator=False)
    ranges = {METADATA_FILE: [(0, files.sizes_bytes[METADATA_FILE])]}
    for item in planner.create_local_plan().items:
        place = metadata.storage_data[item.storage_index]
        ranges.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
    return ranges


def require_adapters_read(metadata: Metadata, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Raise ConfigError for an adapter in a checkpoint that no rank reads: the model would lose it in silence.

    ranges: what all ranks read, sorted and apart.
    """
    starts = {file: [start for start, _ in parts] for file, parts in ranges.items()}

    def is_read(file: str, offset: int) -> bool:
        before = bisect_right(starts.get(file, ()), offset)
        return before > 0 and offset < ranges[file][before - 1][1]

    saved = ((index.fqn, place) for index, place in metadata.storage_data.items() if index.fqn.startswith(WEIGHTS))
    adapters = [(name, place) for name, place in saved if is_adapter(name)]
    read = {name for name, place in adapters if is_read(place.relative_path, place.offset)}
    if unread := sorted({name for name, _ in adapters} - read):
        name = unread[0].removeprefix(WEIGHTS)
        raise _of_other_weights(
            f"holds {len(unread)} matrices of adapters that the model lacks, for example {name}", metadata
        )


def _of_other_weights(how: str, metadata: Metadata) -> ConfigError:
    names = (name.removeprefix(WEIGHTS) for name in metadata.state_dict_metadata)
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in names if is_adapter(name)}
    advice = f"set model.lora.targets to [{', '.join(sorted(targets))}], those of the checkpoint; " if targets else ""
    return ConfigError(
        f"the checkpoint cannot be continued: it {how}",
        expected="a checkpoint of the weights that are trained; an earlier vlmpipe may have had another default of "
        "model.lora.targets",
        fix=f"{advice}continue with the vlmpipe that began it, or start a new run (train.resume=never, or another run "
        "id)",
    )


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
