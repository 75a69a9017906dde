"""Headers of local safetensors files: whether a model's folder has whole files, before any weight is read.

Source of the format: https://huggingface.co/docs/safetensors/index#format. Imports no torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.model_folders import INDEX, WEIGHTS
from vlmpipe.trainer.storage.regular_files import head_of, open_regular, read_regular, stand_in_of

LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000  # of the header's size, and of the header
MAX_INDEX_BYTES = 256 << 20
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


def require_whole_folder(folder: Path) -> int:
    """Raise DataError for a damaged file of weights and for an index that names what is not there.

    Returns the number of tensors, 0 of a folder without safetensors.
    """
    tensors = {path.name: read_header(path) for path in sorted(folder.glob(f"*{WEIGHTS}")) if path.is_file()}
    for index in sorted(folder.glob(f"*{INDEX}")):
        for tensor, file in read_index(index).items():
            if file not in tensors:
                raise _damaged(index, f"names {file!r} for {tensor!r}, which is not in the folder")
            if tensor not in tensors[file]:
                raise _damaged(index, f"says that {tensor!r} is in {file}, which does not hold it")
    return sum(map(len, tensors.values()))


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> name of its file beside the index. Raises DataError, also for names outside of the folder."""
    try:
        found = json.loads(read_regular(path, MAX_INDEX_BYTES))
        files = found["weight_map"]
        entries = dict(files.items())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, "is no index: it has no weight_map") from error
    for tensor, file in entries.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(WEIGHTS):
            raise _damaged(path, f"names {file!r} for {tensor!r}: no {WEIGHTS} file of its folder")
    return entries


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor. Raises DataError, which names the file, unless it is whole."""
    with os_errors(f"reading {path}"), open_regular(path) as file:
        size_bytes = path.stat().st_size
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        begin = LENGTH_BYTES + header_bytes
        if size_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES or begin > size_bytes:
            if found := stand_in_of(head_of(path)):
                raise DataError(f"{path} is {found[0]}", expected="the weights themselves", fix=found[1])
            raise _damaged(path, "has no header of safetensors")
        header = file.read(header_bytes)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        spans = sorted(span(name, entry) for name, entry in entries.items())
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"has a header that cannot be read: {error}") from error
    end = 0
    for start, stop, name in spans:
        if start != end:
            raise _damaged(path, f"has {name!r} at byte {start} of its tensors, where {end} was expected")
        end = stop
    if begin + end != size_bytes:
        raise _damaged(path, f"has {size_bytes:,} bytes, and {begin + end:,} by its header")
    return shapes


def span(name: str, entry: Any) -> tuple[int, int, str]:
    """Where a tensor begins and ends behind the header, and its name. Raises ValueError, LookupError, TypeError."""
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    is_listed = isinstance(shape, list)
    if not is_listed or not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError(f"{name!r} has the shape {shape} and the offsets {entry['data_offsets']}")
    if 8 * (stop - start) != math.prod(shape) * BITS[entry["dtype"]]:
        raise ValueError(f"{name!r} of the shape {shape} has {stop - start} bytes")
    return start, stop, name


def _damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"{path} {how}",
        expected="a whole model, as save_pretrained writes it",
        fix="copy or download the model again: a copy may have been cut off",
    )
