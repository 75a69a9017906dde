"""All answers of the compared runs in one file: Parquet, or JSON lines for Vertex AI's evaluation service."""

from __future__ import annotations

import json
from pathlib import Path

from vlmpipe.comparison.compare import Comparison
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.errors import ConfigError, os_errors

FIELDS = ("id", "turn", "slice", "question", "answer", "prediction", "correct")


def write_predictions(comparison: Comparison, path: Path) -> int:
    """One row for each run and question, also of questions that not all runs were asked. Returns the rows.

    Raises ConfigError unless the file ends in .parquet or .jsonl.
    """
    writers = {".parquet": _write_parquet, ".jsonl": _write_evaluation_set}
    if path.suffix not in writers:
        raise ConfigError(
            f"found --predictions {path}", expected="a file that ends in .parquet, or in .jsonl for Vertex AI's service"
        )
    with os_errors(f"writing {path}"):
        return writers[path.suffix](comparison, path)


def _write_parquet(comparison: Comparison, path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"run": side.name, **{field: line[field] for field in FIELDS}}
        for side in comparison.sides
        for line in side.predictions
    ]
    kinds = {"turn": pa.int32(), "correct": pa.bool_()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in ("run", *FIELDS)])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return len(rows)


def _write_evaluation_set(comparison: Comparison, path: Path) -> int:
    """A line for each answer, with the columns that the Gen AI evaluation service looks for by default.

    Their names are those of vertexai.evaluation.EvalTask: prompt, response, reference and, for pairwise metrics, the
    answer of the first run as baseline_model_response. The service gets the text of questions, not their images.
    """
    first, count = comparison.sides[0], 0
    key = ("id", "turn", "question", "answer")
    baselines = {tuple(line[field] for field in key): line["prediction"] for line in first.predictions}
    with path.open("w", encoding="utf-8") as file:
        for side in comparison.sides:
            for line in side.predictions:
                row = {
                    "run": side.name,
                    "id": line["id"],
                    "turn": line["turn"],
                    "slice": line["slice"],
                    "prompt": line["question"].replace(IMAGE_TOKEN, "").strip(),
                    "reference": line["answer"],
                    "response": line["prediction"],
                }
                baseline = baselines.get(tuple(line[field] for field in key))
                if side is not first and baseline is not None:
                    row["baseline_model_response"] = baseline
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    return count
