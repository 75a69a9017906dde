"""The data that the start model was trained on: known where its weights are the export of a run."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.shards.prepared_files import Manifest, why_unread
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import FOLDER
from vlmpipe.trainer.storage.model_folders import bucket_address


@dataclass(frozen=True)
class StartData:
    """The prepared data of the run whose export the start model is; or, without an address, why it is not known."""

    uri: str = ""
    obstacle: str = ""

    @property
    def fingerprint(self) -> str:
        """Name of the data, by its content; empty where it is not known."""
        return self.uri.rstrip("/").rpartition("/")[2]


def trained_last(model: ModelConfig) -> str:
    """Address of the start weights that were trained last: an adapter, the whole model, or the language model."""
    if model.lora and model.lora.pretrained:
        return model.lora.pretrained
    return next((part.weights for part in (model.pretrained, model.language_model) if part and part.weights), "")


def start_data(model: ModelConfig) -> StartData:
    """The data that these start weights were trained on. Reads two small files; raises nothing for what is missing."""
    weights = trained_last(model)
    run, _, folder = (bucket_address(weights) or weights).rstrip("/").rpartition("/")
    if folder != FOLDER or not run:
        return StartData(obstacle=f"the start model, {weights or 'drawn at random'}, is not the export of a run")
    try:
        pointers = DataPointers.read_if_there(open_storage(run))
        if pointers is None:
            return StartData(obstacle=f"{run} does not say which data its model was trained on")
        Manifest.read(open_storage(pointers.prepared_uri))
    except UserError as error:
        return StartData(obstacle=f"the data of {run}, on which the start model was trained: {why_unread(error)}")
    return StartData(pointers.prepared_uri)
