"""Tensors of a safetensors file that is read by ranges, one tensor at a time, without a copy on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property

import google_crc32c
import torch
from torch import Tensor

from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.safetensors_header import Place, places_in
from vlmpipe.trainer.sizing.export_size import IN_FLIGHT_BYTES
from vlmpipe.trainer.storage.bucket import TRANSFER_ATTEMPTS
from vlmpipe.trainer.storage.transfer import in_parallel

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
READ = {name: dtype for dtype, name in DTYPES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
THREADS = 8
PIECE_BYTES = 32 << 20  # of one request


@dataclass(frozen=True)
class Source:
    """A file elsewhere. read: bytes of it, from one place to another.

    It raises UserError, also where the file is no longer the one that was looked up.
    """

    uri: str
    size_bytes: int
    read: Callable[[int, int], bytes]


Sums = MutableMapping[tuple[str, str], int]  # CRC32C of a tensor by file and name


class RangedFile:
    """The part of `safetensors.safe_open` that reads weights. Raises DataError for a damaged file.

    A tensor that `sums` holds from an earlier reading must have the same bytes again; others are added to it.
    """

    def __init__(self, source: Source, sums: Sums) -> None:
        self._source, self._sums = source, sums

    def __enter__(self) -> RangedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> Iterator[str]:
        return iter(self._places)

    def get_tensor(self, name: str) -> Tensor:
        place, key = self._places[name], (self._source.uri, name)
        if place.dtype not in READ:
            raise self._damaged(f"{name} has the type {place.dtype}, which is not read here")
        for _ in range(TRANSFER_ATTEMPTS):
            data, found = self._read(place.start, place.end)
            if self._sums.setdefault(key, found) == found:
                break
        else:
            raise self._damaged(f"{name} has other bytes than when it was first read")
        dtype = READ[place.dtype]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(place.shape)

    def get_slice(self, name: str) -> RangedTensor:
        return RangedTensor(self, name, self._places[name].shape)

    @cached_property
    def _places(self) -> dict[str, Place]:
        source = self._source  # a proxy may have announced another size
        return places_in(source.uri, source.size_bytes, lambda *at: bytes(self._read(*at)[0]), may_be_longer=True)

    def _read(self, start: int, end: int) -> tuple[bytearray, int]:
        """Bytes of the file, and their CRC32C."""
        pieces = [(at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)]
        arriving = in_parallel(
            lambda piece: self._source.read(*piece),
            pieces,
            threads=min(THREADS, max(1, len(pieces))),
            weigh=lambda piece: piece[1] - piece[0],
            max_bytes=IN_FLIGHT_BYTES,
        )
        data, crc32c = bytearray(end - start), 0
        for (first, stop), arrived in zip(pieces, arriving, strict=True):
            if len(arrived) != stop - first:
                raise self._damaged(f"bytes {first} to {stop} of it arrive as {len(arrived)}")
            data[first - start : stop - start] = arrived
            crc32c = int(google_crc32c.extend(crc32c, arrived))
        return data, crc32c

    def _damaged(self, how: str) -> DataError:
        return DataError(
            f"{self._source.uri}: {how}",
            expected="a whole safetensors file that does not change while it is read",
            fix="copy the model there again, and repeat the step",
        )


class RangedTensor:
    """A tensor whose shape is known and whose numbers are read when some of them are asked for."""

    def __init__(self, file: RangedFile, name: str, shape: tuple[int, ...]) -> None:
        self._file, self._name, self._shape = file, name, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]

    @cached_property
    def _tensor(self) -> Tensor:
        return self._file.get_tensor(self._name)
