"""Evidence in probes about the assumptions on Vertex AI and Cloud Storage (catalog/unproved.yaml)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vlmpipe.catalog.unproved import Sighting, note_sightings
from vlmpipe.trainer.distributed.cuda_builds import driver_runs
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage


def sightings_of(result: Mapping[str, Any], run: str) -> Iterator[Sighting]:
    """Evidence in one probe's result; nothing of what it had no occasion to see."""
    plan, measured = result["plan"], result["measured"]
    if probe := measured["gpus"]:
        seen, paid, driver = len(probe["gpus"]), plan["accelerator_count"], probe["driver"]
        devices = f"{seen} of {paid} GPUs seen on {plan['machine']}, driver {driver or 'not found'}"
        runs = driver_runs(driver, probe["cuda"]) if driver and probe["cuda"] else None
        if runs is not False:  # with a driver that is too old no GPU is seen, wherever its libraries are
            yield Sighting("vertex-gpu-libraries-path", bool(driver) and bool(seen), devices, "probe", run)
        if runs is not None:
            holds = runs and seen > 0
            yield Sighting("vertex-driver-runs-the-wheel", holds, f"{devices}, CUDA {probe['cuda']}", "probe", run)
    rate, planned = measured["bucket"]["write_gbytes_per_s"], plan["write_gbytes_per_s"]
    if planned and plan["root_uri"].startswith("gs://"):
        devices = f"{rate:.3g} GB/s written, {planned:g} planned"
        yield Sighting("gcs-throughput", rate >= planned, devices, "probe", run)


def note_probes(results: Iterable[Mapping[str, Any]], run: str) -> list[str]:
    """Record what the probes of a run show in the folder of all runs. Returns a line for each that is new."""
    lines = []
    for result in results:
        try:
            new = note_sightings(open_storage(result["plan"]["root_uri"]), sightings_of(result, run))
        except UserError as error:
            return [f"note: what the probe shows was not recorded: {error.found.splitlines()[0]}"]
        lines += [
            f"note: {sighting.id} {'holds' if sighting.holds else 'is contradicted'}: {sighting.said} "
            "(vlmpipe docs unproved)"
            for sighting in new
        ]
    return lines
