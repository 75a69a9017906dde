"""Memory of `prepare-data`, over chunks that are made without preparing their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.merge import made
from benchmarks.scale.preparation_tasks import measured
from benchmarks.support.processes import call
from tests.support.short_form import only_whole

FEW, MANY = 400_000, 1_600_000  # from some 300,000 records on, every buffer is full
MAX_GROWN_MIB = 12  # 10 bytes a record


def test_made_chunks_are_merged_into_prepared_data(memory: Path) -> None:
    made(str(memory), 2_000)
    figures = measured(str(memory), 2_000, "merge")
    assert figures["accepted"] == 2_000 and figures["whole"]
    assert figures["mib"] > 0 and figures["mapped_mib"] > 0


@only_whole
@pytest.mark.timeout(1200)
def test_memory_of_the_merge_does_not_grow_with_the_records(tmp_path: Path) -> None:
    most = []
    for records in (FEW, MANY):
        arguments = {"folder": str(tmp_path / str(records)), "records": records}
        call("benchmarks.scale.merge:made", arguments)
        most.append(call("benchmarks.scale.preparation_tasks:measured", arguments | {"step": "merge"})["mib"])
    assert most[1] - most[0] < MAX_GROWN_MIB, most
