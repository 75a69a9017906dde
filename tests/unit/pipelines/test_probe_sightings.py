"""What a probe ticks off of the assumptions about services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmpipe.catalog.unproved import load_assumptions, read_sightings
from vlmpipe.pipelines.probe_sightings import note_probes, sightings_of
from vlmpipe.trainer.storage import open_storage

GPU = {"name": "NVIDIA L4", "memory_bytes": 1, "capability": [8, 9]}


def result(root: str = "gs://b", *, gpus: int = 1, driver: str = "560.35.03", rate: float = 0.6) -> dict[str, Any]:
    found = {"gpus": [GPU] * gpus, "driver": driver, "cuda": "12.6"}
    plan = {"accelerator_count": 1, "machine": "g2-standard-4", "write_gbytes_per_s": 0.5, "root_uri": root}
    return {"plan": plan, "measured": {"gpus": found, "bucket": {"write_gbytes_per_s": rate}}}


@pytest.mark.parametrize(
    ("probed", "seen"),
    [
        (result(), {"vertex-gpu-libraries-path": True, "vertex-driver-runs-the-wheel": True, "gcs-throughput": True}),
        (result(gpus=0, driver=""), {"vertex-gpu-libraries-path": False, "gcs-throughput": True}),
        (
            result(gpus=0, driver="470.10", rate=0.1),
            {"vertex-driver-runs-the-wheel": False, "gcs-throughput": False},
        ),
    ],
    ids=["well", "no driver found", "old driver, slow bucket"],
)
def test_a_probe_confirms_or_contradicts_what_it_had_occasion_to_see(
    probed: dict[str, Any], seen: dict[str, bool]
) -> None:
    assert {one.id: one.holds for one in sightings_of(probed, "p1")} == seen


def test_the_list_names_the_probe_for_exactly_what_it_ticks_off() -> None:
    assert {one.id for one in load_assumptions() if "probe" in one.tools} == {
        one.id for one in sightings_of(result(), "p1")
    }


def test_what_is_new_is_recorded_and_said_once(tmp_path: Path) -> None:
    probed = result(str(tmp_path))
    assert len(note_probes([probed], "p1")) == 2 and note_probes([probed], "p2") == []
    assert read_sightings(open_storage(str(tmp_path)))["vertex-gpu-libraries-path"].run == "p1"
