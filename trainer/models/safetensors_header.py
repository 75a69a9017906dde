"""Headers of safetensors files: where tensors are, and whether files are whole, before any weight is read.

Source of the format: https://huggingface.co/docs/safetensors/index#format. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.model_folders import INDEX, WEIGHTS
from vlmpipe.trainer.storage.regular_files import STAND_IN_BYTES, open_regular, read_regular, stand_in_of

LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000  # of the header's size, and of the header
MAX_INDEX_BYTES = 256 << 20
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Type of a tensor, by its name in the format, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def require_whole_folder(folder: Path) -> int:
    """Raise DataError for a damaged file of weights and for an index that names missing files.

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
        index = json.loads(read_regular(path, MAX_INDEX_BYTES))
        files = index["weight_map"]
        entries = dict(files.items())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, "is no index: it has no weight_map") from error
    for tensor, file in entries.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(WEIGHTS):
            raise _damaged(path, f"names {file!r} for {tensor!r}: no {WEIGHTS} file of its folder")
    return entries


def read_header(path: Path) -> dict[str, Place]:
    """Places of the tensors in a file on this machine. Raises as `places_in`."""
    with os_errors(f"reading {path}"), open_regular(path) as file:

        def read(start: int, end: int) -> bytes:
            file.seek(start)
            return file.read(end - start)

        return places_in(path, path.stat().st_size, read)


def places_in(
    file: Path | str, size_bytes: int, read: Callable[[int, int], bytes], *, may_be_longer: bool = False
) -> dict[str, Place]:
    """Place of each tensor by its name. read: bytes of the file, from one place to another.

    Raises DataError, which names the file, unless it is whole.
    """
    begin = LENGTH_BYTES + int.from_bytes(read(0, LENGTH_BYTES), "little")
    if size_bytes < LENGTH_BYTES or begin > min(size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES):
        if stand_in := stand_in_of(read(0, min(STAND_IN_BYTES, size_bytes))):
            raise DataError(f"{file} is {stand_in[0]}", expected="the weights themselves", fix=stand_in[1])
        raise _damaged(file, "has no header of safetensors")
    try:
        entries = json.loads(read(LENGTH_BYTES, begin)).items()
        places = {name: _place(name, entry, begin) for name, entry in entries if name != "__metadata__"}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"has a header that cannot be read: {error}") from error
    end = begin
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != end:
            raise _damaged(file, f"has {name!r} at byte {place.start}, where {end} was expected")
        end = place.end
    if end > size_bytes or (end < size_bytes and not may_be_longer):
        raise _damaged(file, f"has {size_bytes:,} bytes, and {end:,} by its header")
    return places


def _place(name: str, entry: Any, begin: int) -> Place:
    """Raises ValueError, LookupError, TypeError."""
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    is_listed = isinstance(shape, list)
    if not is_listed or not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{name!r} has the shape {shape} and the offsets {entry['data_offsets']}")
    if 8 * (end - start) != math.prod(shape) * BITS[entry["dtype"]]:
        raise ValueError(f"{name!r} of the shape {shape} has {end - start} bytes")
    return Place(entry["dtype"], tuple(shape), begin + start, begin + end)


def _damaged(file: Path | str, how: str) -> DataError:
    return DataError(
        f"{file} {how}",
        expected="a whole model, as save_pretrained writes it",
        fix="copy or download the model again: a copy may have been cut off",
    )
