"""Facts about columns from schema and statistics of Parquet and Arrow files, without reading rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def names_files(path: Path, columns: Sequence[str], *, is_arrow: bool) -> bool:
    """Return whether some image in these columns is a name instead of bytes; also where that cannot be told."""
    if is_arrow:
        return _arrow_names_files(path, columns)
    with pq.ParquetFile(path, pre_buffer=False) as file:
        fields = [field for field in file.schema_arrow if field.name in columns]
        if any(_holds_text(field.type) for field in fields):
            return True
        metadata = file.metadata
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                first, _, last = column.path_in_schema.partition(".")
                if first in columns and last.endswith("bytes"):
                    statistics = column.statistics
                    if statistics is None or not statistics.has_null_count or statistics.null_count:
                        return True
    return False


def _arrow_names_files(path: Path, columns: Sequence[str]) -> bool:
    with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
        names = [name for name in stream.schema.names if name in columns]
        if any(_holds_text(stream.schema.field(name).type) for name in names):
            return True
        for batch in stream:
            batch.validate(full=True)  # offsets in a damaged file may point anywhere into memory
            if any(array.null_count for name in names for array in _bytes_in(batch.column(name))):
                return True
        return False


def _bytes_in(array: pa.Array) -> Iterator[pa.Array]:
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        yield array.field("bytes")


def _holds_text(kind: pa.DataType) -> bool:
    """Return whether an image is a text: a name or an address."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
