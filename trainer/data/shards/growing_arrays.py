"""Arrow arrays of any length, made with flat memory: their buffers grow in files and are mapped when they are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

FIRST_OFFSET = np.zeros(1, np.int64).tobytes()


class GrowingArray:
    """An array without nulls that grows by pieces: of numbers, fixed-size binary, large strings, large lists, structs.

    Its buffers are files in `folder`, which must stay while the array is used.
    """

    def __init__(self, kind: pa.DataType, folder: Path) -> None:
        folder.mkdir()
        self._kind, self._length, self._buffers = kind, 0, [None]  # the first: no null
        has_offsets = pa.types.is_large_string(kind) or pa.types.is_large_list(kind)
        self._end = 0  # of the last value, where the values have offsets
        self._children = [
            GrowingArray(kind.field(number).type, folder / str(number)) for number in range(kind.num_fields)
        ]
        files = 0 if pa.types.is_struct(kind) else 2 if pa.types.is_large_string(kind) else 1
        self._paths = [folder / f"buffer-{number}" for number in range(files)]
        self._files = [path.open("wb") for path in self._paths]
        if has_offsets:
            self._files[0].write(FIRST_OFFSET)

    def append(self, piece: pa.Array) -> None:
        """Append the values of an array of the same type."""
        assert piece.type == self._kind and not piece.null_count, f"{piece.type}, {piece.null_count} nulls"
        self._length += len(piece)
        if pa.types.is_struct(self._kind):
            for number, child in enumerate(self._children):
                child.append(piece.field(number))
        elif pa.types.is_large_list(self._kind):
            start, stop = self._append_offsets(piece.offsets.to_numpy())
            self._children[0].append(piece.values[start:stop])
        elif pa.types.is_large_string(self._kind):
            _, buffer, text = piece.buffers()
            offsets = np.frombuffer(buffer, np.int64)[piece.offset : piece.offset + len(piece) + 1]
            start, stop = self._append_offsets(offsets)
            if stop > start:
                self._files[1].write(memoryview(text)[start:stop])
        elif len(piece):
            width = self._kind.byte_width
            values = memoryview(piece.buffers()[1])
            self._files[0].write(values[piece.offset * width : (piece.offset + len(piece)) * width])

    def whole(self) -> pa.Array:
        """The array, its buffers mapped from their files. Nothing is appended afterwards."""
        for file in self._files:
            file.close()
        buffers = [None, *map(_mapped, self._paths)]
        children = [child.whole() for child in self._children]
        return pa.Array.from_buffers(self._kind, self._length, buffers, null_count=0, children=children)

    def _append_offsets(self, offsets: np.ndarray) -> tuple[int, int]:
        """Append offsets, which start anywhere. Returns the first and the last."""
        start, stop = int(offsets[0]), int(offsets[-1])
        self._files[0].write((offsets[1:] + (self._end - start)).tobytes())
        self._end += stop - start
        return start, stop


def _mapped(path: Path) -> pa.Buffer:
    if not path.stat().st_size:  # which cannot be mapped
        return pa.py_buffer(b"")
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()
