"""Where a later stage starts: the weights and the tokenizer that it takes from the stages before it."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS, ModelPart
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.export_manifest import FOLDER, NAME


def continued(config: RunConfig, this: RunPaths, before: Sequence[tuple[RunConfig, RunPaths]]) -> RunConfig:
    """The run file of a stage with the export of the stage before it as the source of trained parts.

    Parts that no stage has trained keep their source, and so the cached features of a tower their address. Raises
    ConfigError where there is no export.

    Args:
        before: the stages before this one, the first one first.
    """
    previous, model = open_storage(before[-1][1].run_uri), config.model
    if previous.stat(NAME) is None:
        raise ConfigError(
            f"there is no model in {previous.uri(FOLDER)}",
            expected="the export of the stage before, with which this one starts",
            fix="run the pipeline from its first stage",
        )
    export = previous.uri(FOLDER)
    # With the revisions of weights in buckets that the stage before has found.
    sources = JobConfig.read(previous).model.sources
    is_trained = model.tokenizer.startswith("train:")
    trained = [part for part in PARTS if any(_trains(run.model, part) for run, _ in before)]
    changes = {
        **{name: part and part.model_dump() for name, part in sources.items()},
        **{name: {"weights": export} for name in (["pretrained"] if model.pretrained else trained)},
        "tokenizer": _tokenizer(config, this, before[0][1], export),
        # Its weights' address is now the export's, whose revision is not the tokenizer's.
        **({} if is_trained else {"tokenizer_revision": model.tokenizer_source.revision}),
    }
    model = ModelConfig.model_validate(model.model_dump() | changes)
    data, chat_format = config.data, config.data.chat_format(config.model)
    if data.chat_format(model) != chat_format:  # a model with weights would be asked in the format of its tokenizer
        data = data.model_copy(update={"chat_template": chat_format})
    return config.model_copy(update={"model": model, "data": data})


def _trains(model: ModelConfig, part: ModelPart) -> bool:
    return part not in model.freeze or bool(model.train_parameters)


def _tokenizer(config: RunConfig, this: RunPaths, first: RunPaths, export: str) -> str:
    """Train a tokenizer again only on the first stage's very data, which gives the same one."""
    tokenizer = config.model.tokenizer
    if not tokenizer.startswith("train:"):
        return tokenizer
    pointers = DataPointers.read(open_storage(first.run_uri))
    prepared = fingerprint(JobConfig.model_validate(config.to_run_json(this)))
    return tokenizer if pointers.prepared_uri == join_uri(this.prepared_root, prepared) else export
