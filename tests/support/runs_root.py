"""An output folder with small runs of every outcome, by the records that runs leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal_lines, write_record

DONE, FAILED, STOPPED = 0, 65, 130


def write_run(
    root: Path,
    run_id: str,
    *,
    name: str = "digits",
    started_s: float = 1.0,
    exit_code: int | None = DONE,
    prepared: str = "",
    settings: Mapping[str, Any] | None = None,
    losses: tuple[float, ...] = (),
    exact_match: float | None = None,
) -> Path:
    """A run's folder. prepared: name of the prepared data and of the features that it points at, which are made."""
    folder = root / "runs" / run_id
    store = LocalStorage(folder)
    Marker(run_id, "digest", (f"{name}.yaml",), started_s, started_s + 1, exit_code, name=name).write(folder)
    write_record(store, "run_file.json", {"name": name, **(settings or {})})
    if prepared:
        pointers = {"features": "reuse"}
        for kind in ("prepared", "features"):
            place = root / kind / prepared
            place.mkdir(parents=True, exist_ok=True)
            (place / "data").write_bytes(b"0" * 1000)
            pointers[f"{kind}_uri"] = str(place)
        write_record(store, "prepared.json", pointers)
    if losses:
        store.write("metrics.jsonl", seal_lines([{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)]))
    if exact_match is not None:
        write_record(store, "evaluate.json", {"questions": 10, "exact_match": exact_match})
        write_record(store, "decision.json", {"accepted": exact_match >= 0.5, "reason": "by its score"})
    return folder


def register(root: Path, run_id: str, model: str = "digits", *, promote: bool = True) -> None:
    """Make a version of the run's export, the champion where `promote`."""
    folder = root / "runs" / run_id
    LocalStorage(folder).write("export/model.safetensors", b"weights")
    registry = FolderRegistry(str(root / "registry"))
    candidate = Candidate(run_id=run_id, export_uri=str(folder / "export"), checkpoint="c", metrics={})
    champion, entry = registry.champion(model), registry.register(model, candidate, "# card")
    if promote:
        registry.promote(model, entry.version, instead_of=champion.version if champion else None)
    registered = {"model": model, "version": entry.version, "uri": entry.model_uri, "alias": "champion"}
    write_record(LocalStorage(folder), "registered.json", registered)
