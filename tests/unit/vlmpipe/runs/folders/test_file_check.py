"""`vlmpipe status --deep` reads every file of a run and names the first damaged one of each part."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.support.data.prepared import prepare_llava
from tests.support.reports import make_run, write_export
from tests.support.short_form import chosen
from tests.support.special_files import INSTEAD
from vlmpipe.registry.release import decide_run, register_run
from vlmpipe.runs.folders.file_check import check_files
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.feature_cache.store import write_shard
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.progress import step_progress
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.quantized import QuantizedScores
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import quantized_folder, write_description
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import (
    read_lines,
    read_record,
    read_record_file,
    seal_lines,
    unseal,
    unseal_lines,
    write_record,
)

EXAMPLES_VARIABLE = "VLMPIPE_FUZZ_EXAMPLES"
EXAMPLES = int(os.environ.get(EXAMPLES_VARIABLE, 30))


def write_training_records(run: Path) -> None:
    with step_progress(str(run), "train") as progress:
        progress.finish(message="loss 0.5")
    log = MetricsLog(str(run), resumed_from_step=0)
    log.write(1, {"loss": 0.75})
    log.write(2, {"loss": 0.5})
    log.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    _, prepared = prepare_llava(tmp_path, count=20)
    features = tmp_path / "features/0123"
    image = {"ab" * 32: torch.zeros(2, 4, dtype=torch.bfloat16)}
    write_shard(open_storage(str(features)), tmp_path, image, tower_sha256="0")
    run = tmp_path / "runs/a"
    write_export(run)
    pointers = {"prepared_uri": prepared.uri, "features_uri": str(features), "features": "reuse"}
    write_record(open_storage(str(run)), "prepared.json", pointers, indent=1)
    write_training_records(run)
    return run


def files_of(run: Path) -> dict[str, list[Path]]:
    pointers = read_record_file(run / "prepared.json")
    folders = {"prepared data": pointers["prepared_uri"], "features": pointers["features_uri"]}
    folders["export"] = str(run / "export")
    files = {name: sorted(path for path in Path(at).rglob("*") if path.is_file()) for name, at in folders.items()}
    return {"records": [run / "metrics.jsonl", run / "prepared.json", run / "steps/train.json"], **files}


def test_a_whole_run_is_whole(run: Path) -> None:
    checks = list(check_files(str(run)))
    assert [(check.part, check.problem) for check in checks] == [(name, "") for name in files_of(run)]
    assert [check.files for check in checks][:1] == [3] and all(check.files for check in checks)


def test_quantized_exports_are_checked_and_one_that_was_accepted_is_not_missing(run: Path) -> None:
    store, weights = open_storage(str(run)), run / "export-int4/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"0" * 100)
    write_description(store, {"files": {weights.name: asdict(FileSum.of(weights))}}, quantized_folder("int4"))
    assert [(one.part, one.files, one.problem) for one in check_files(str(run))][-1] == ("int4 export", 1, "")
    weights.write_bytes(b"1" * 100)
    assert "model.safetensors is damaged" in next(one.problem for one in check_files(str(run)) if "int4" in one.part)
    shutil.rmtree(weights.parent)
    assert not any("int4" in one.part for one in check_files(str(run)))
    evaluation = Evaluation(quantized={"int4": QuantizedScores(accepted=True)})
    evaluation.write(store)
    assert "no exported model" in next(one.problem for one in check_files(str(run)) if one.part == "int4 export")


def test_features_that_training_read_and_that_are_gone_are_a_problem(run: Path) -> None:
    shutil.rmtree(read_record_file(run / "prepared.json")["features_uri"])
    assert not any(check.problem for check in check_files(str(run))), "none were encoded yet"
    (run / "checkpoints/0001").mkdir(parents=True)
    (run / "checkpoints/0001/shard").write_bytes(b"0")
    assert [check.part for check in check_files(str(run)) if check.problem] == ["features"]


def test_damage_to_any_file_is_found_in_its_part(run: Path) -> None:
    for part, files in files_of(run).items():
        for path in files:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if whole else b"\0")
            assert [check.part for check in check_files(str(run)) if check.problem] == [part], path
            path.unlink()
            # Without its sidecar a shard does not count, and without its record a step is not known.
            if part != "records" and (part, path.suffix) != ("features", ".json"):
                assert part in [check.part for check in check_files(str(run)) if check.problem], path
            path.write_bytes(whole)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", chosen({kind: kind for kind in INSTEAD}, lambda kind: kind in ("FIFO", "folder")))
def test_a_special_file_in_place_of_any_file_is_found(run: Path, kind: str) -> None:
    for part, files in files_of(run).items():
        for path in files:
            whole = path.read_bytes()
            INSTEAD[kind](path)
            found = [check.part for check in check_files(str(run)) if check.problem]
            # What is no file is no record and no sidecar, as if it were missing.
            assert part in found or part == "records" or (part, path.suffix) == ("features", ".json"), path
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(whole)


@pytest.mark.timeout(60 + EXAMPLES)
def test_flips_anywhere_are_found(run: Path) -> None:
    """`make fuzz-data` flips other bits, and more of them."""
    draw = random.Random(None if EXAMPLES_VARIABLE in os.environ else 5)
    files = [(part, path) for part, paths in files_of(run).items() for path in paths if path.stat().st_size]
    for _ in range(EXAMPLES):
        part, path = draw.choice(files)
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, draw.randrange(8 * len(whole))))
        assert part in [check.part for check in check_files(str(run)) if check.problem], path
        path.write_bytes(whole)


def test_a_record_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (check,) = check_files(str(tmp_path))
    assert (check.part, "it has no checksum (CRC32C)" in check.problem) == ("records", True)


def test_every_flip_of_a_bit_in_a_record_is_found_at_the_next_read(tmp_path: Path) -> None:
    write_training_records(tmp_path)
    for name in ("steps/train.json", "metrics.jsonl"):
        whole = (tmp_path / name).read_bytes()
        check = unseal_lines if name == "metrics.jsonl" else unseal
        assert check(whole)
        for bit in range(8 * len(whole)):
            with pytest.raises(ValueError):
                check(flipped(whole, bit))
        (tmp_path / name).write_bytes(flipped(whole, 100))
        read = read_lines if name == "metrics.jsonl" else read_record
        with pytest.raises(DataError, match=f"{name} is damaged") as error:
            read(open_storage(str(tmp_path)), name)
        assert "delete the file" in error.value.fix


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_what_the_gate_and_the_registry_write_is_sealed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_export(run)
    decide_run(str(run))
    register_run(str(run))
    written = [run / "decision.json", run / "registered.json", *(tmp_path / "registry").rglob("*/versions/*.json")]
    assert len(written) == 3
    for path in written:
        path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
        with pytest.raises(DataError, match="is damaged"):
            read_record_file(path)


def test_a_record_of_another_program_is_read_as_it_is(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"name": "a"}))
    assert read_record(store, "run.json") == {"name": "a"}
    write_record(store, "run.json", {"name": "a"})
    edited = json.loads((tmp_path / "run.json").read_text()) | {"name": "b"}
    (tmp_path / "run.json").write_text(json.dumps(edited))
    with pytest.raises(DataError, match=r"(?s)run\.json is damaged.*leave out its record_crc32c"):
        read_record(store, "run.json")
    (tmp_path / "metrics.jsonl").write_bytes(seal_lines([{"step": 1}, {"step": 2}])[:-9])
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged: line 2"):
        read_lines(store, "metrics.jsonl")
