"""The merge that `make bench-data` measures: chunks that are made without preparing their records."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scale.merge import made
from benchmarks.scale.preparation_tasks import measured


def test_made_chunks_are_merged_into_prepared_data(memory: Path) -> None:
    made(str(memory), 2_000)
    figures = measured(str(memory), 2_000, "merge")
    assert figures["accepted"] == 2_000 and figures["whole"]
    assert figures["mib"] > 0 and figures["mapped_mib"] > 0
