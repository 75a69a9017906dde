"""All answers of the compared runs in one Parquet file."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import os_errors
from vlmpipe.compare.compare import Comparison

FIELDS = ("id", "turn", "slice", "question", "answer", "prediction", "correct")


def write_predictions(comparison: Comparison, path: Path) -> int:
    """One row for each run and question, also of questions that not all runs were asked. Returns the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"run": side.name, **{field: line[field] for field in FIELDS}}
        for side in comparison.sides
        for line in side.predictions
    ]
    kinds = {"turn": pa.int32(), "correct": pa.bool_()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in ("run", *FIELDS)])
    with os_errors(f"writing {path}"):
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return len(rows)
