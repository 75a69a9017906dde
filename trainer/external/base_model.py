"""The model that a training program starts from: a Hugging Face folder, or the hub id that the run file names."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.file_sums import FileSum, damaged_files, upload_folder
from vlmpipe.trainer.storage.model_folders import local_folder
from vlmpipe.trainer.storage.records import read_record, write_record

FOLDER, DESCRIPTION = "base", "base.json"  # in a run


def model_section_sha256(job: JobConfig) -> str:
    """Digest of the model section."""
    section = job.model.model_dump(mode="json", exclude_none=True, exclude={"hub_token_secret"})
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()


def is_published(job: JobConfig) -> bool:
    """Return whether the run file names the whole model, so that none has to be made."""
    return bool(job.model.pretrained and job.model.pretrained.weights)


def write_base_model(job: JobConfig, prepared_uri: str) -> bool:
    """Write the model that our trainer would start from to `<run>/base`, unless it is there or published."""
    store = open_storage(job.run.run_uri)
    made_of = {"model_sha256": model_section_sha256(job), "prepared_uri": prepared_uri}
    if is_published(job) or (store.stat(DESCRIPTION) and made_of.items() <= read_record(store, DESCRIPTION).items()):
        return False
    from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
    from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
    from vlmpipe.trainer.data.shards.prepared_files import open_prepared
    from vlmpipe.trainer.data.tokenize import load_tokenizer
    from vlmpipe.trainer.models.registry import family_of

    family, tokenizer = family_of(job.model), load_tokenizer(open_prepared(prepared_uri))
    model = family.build(job.model, tokenizer)
    store.delete(DESCRIPTION)
    store.delete_folder(FOLDER)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-base-") as scratch, os_errors(f"writing {scratch}"):
        write_weights(model, model.state_dict().__getitem__, Path(scratch))
        save_settings(family, job.model, model, tokenizer, Path(scratch))
        sums = upload_folder(open_storage(join_uri(job.run.run_uri, FOLDER)), Path(scratch))
    write_record(store, DESCRIPTION, {**made_of, "files": {name: asdict(file) for name, file in sums.items()}})
    return True


def base_model(job: JobConfig, folder: Path) -> str:
    """The base model as the program gets it: `folder`, filled, a folder that is there, or a hub id.

    Raises DataError where prepare-data has left none, or a damaged one.
    """
    if is_published(job):
        assert job.model.pretrained
        weights, revision = job.model.pretrained.weights, job.model.pretrained.revision
        folder_here = local_folder(weights, revision)
        return str(folder_here.absolute()) if folder_here else weights
    run = open_storage(job.run.run_uri)
    if run.stat(DESCRIPTION) is None:
        raise DataError(f"there is no base model in {run.uri(FOLDER)}", fix="run the prepare-data step first")
    store = open_storage(run.uri(FOLDER))
    expected = {name: FileSum(**sums) for name, sums in read_record(run, DESCRIPTION)["files"].items()}
    if damaged := damaged_files(store, expected):
        raise DataError(
            f"{store.uri(damaged[0])} is damaged",
            expected="the base model as prepare-data wrote it",
            fix=f"delete {run.uri(DESCRIPTION)} and run the same command again",
        )
    for name in expected:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.fetch(name), folder / name)
    return str(folder)
