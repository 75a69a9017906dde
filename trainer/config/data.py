"""The run file's `data` section: where samples come from, and how they are packed."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PrivateAttr, ValidationInfo, field_validator, model_validator

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.sources.data_fields import BY_IMAGE, BY_RECORD, DataFields
from vlmpipe.trainer.config.sources.data_source import Columns, DataSource, function_named, require_function

NATIVE, OWN_FORMAT = "native", "vlmpipe"  # values of data.chat_template (every other one is a file's address)
REPLAY_SAMPLES = "samples"  # folder of the start model's answers, below `replay_folder`


class DataConfig(DataFields):
    """Where samples come from, and how they become packed sequences."""

    _fetched_folder: str = PrivateAttr("")  # not in the run file: it is below the root of the run
    _replay_folder: str = PrivateAttr("")  # likewise

    @property
    def fetched_folder(self) -> str:
        """Where images of the web are kept; "" where that is not known, or none is fetched."""
        return self._fetched_folder

    def fetching_into(self, folder: str) -> DataConfig:
        """This section with a known `fetched_folder`."""
        located = self.model_copy()
        located._fetched_folder = folder
        return located

    @property
    def replay(self) -> DataSource | None:
        """The source of the start model's answers, if there is one."""
        return next((source for source in self.sources if source.replay), None)

    @property
    def replay_folder(self) -> str:
        """Where the start model's answers are; "" where that is not known."""
        return self._replay_folder

    def replaying_from(self, folder: str) -> DataConfig:
        """This section with a known `replay_folder`."""
        located = self.model_copy()
        located._replay_folder = folder
        return located

    def without_replay(self) -> DataConfig:
        """This section with the sources that have an address."""
        return self.model_copy(update={"sources": tuple(source for source in self.sources if source.uri)})

    @property
    def all_sources(self) -> tuple[DataSource, ...]:
        """The sources, or `source` as the only one."""
        only = {
            "uri": self.source,
            "arguments": self.source_arguments,
            "image_folder": self.image_folder,
            "max_samples": self.max_samples,
        }
        return self.sources or (DataSource(name="source", **only),)

    def described(self) -> str:
        """The source, or the sources with their names, for people."""
        return ", ".join(f"{source.name} ({source.address})" for source in self.sources) or self.source

    def by_field(self) -> dict[str, DataSource]:
        """The sources by the beginning of their fields in the run file, such as `data.sources.0.`."""
        return {f"data.sources.{n}." if self.sources else "data.": source for n, source in enumerate(self.all_sources)}

    def addresses(self) -> dict[str, str]:
        """Where samples and their image files are, by the field of the run file; image folders only where given.

        Of a function it is the address of its file; an installed module has none.
        """
        by_name = {}
        for field, source in self.by_field().items():
            module, _ = function_named(source.uri) or (source.uri, "")
            if isinstance(source.replay_prompts, str):
                by_name[f"{field}replay_prompts"] = source.replay_prompts
            elif source.uri and (module == source.uri or module.endswith(".py")):
                by_name[field + ("uri" if self.sources else "source")] = module
            if source.image_folder:
                by_name[f"{field}image_folder"] = source.image_folder
        return by_name

    def of_source(self, source: DataSource) -> DataConfig:
        """This section with one of its sources alone."""
        alone = {"source": source.uri, "sources": (), "phases": (), "max_samples": source.max_samples}
        if source.replay:  # files of vlmpipe's own, with none of the fields that other records are asked for
            alone["source"] = f"{self._replay_folder}/{REPLAY_SAMPLES}" if self._replay_folder else ""
            own_form = {"columns": Columns(), "split_by": BY_RECORD, "slices": (), "file_splits": "ignored"}
            return self.model_copy(update=alone | own_form | {"source_arguments": {}, "image_folder": ""})
        fields = {
            "source_arguments": source.arguments,
            "image_folder": source.image_folder,
            "caption_question": source.caption_question or self.caption_question,
            "columns": self.columns if source.columns == Columns() else source.columns,
        }
        return self.model_copy(update=alone | fields)

    def weights(self, epoch: int) -> tuple[float, ...] | None:
        """The weight of each source in an epoch; None where they have numbers of samples or epochs."""
        if self.phases:
            phase, left = self.phases[0], epoch
            for following in self.phases[1:]:
                if left < phase.epochs:
                    break
                phase, left = following, left - phase.epochs
            return tuple(phase.weights.get(source.name, 0.0) for source in self.sources)
        of_sources = [source.weight for source in self.sources if source.weight is not None]
        return tuple(of_sources) or None

    def chat_format(self, model: ModelConfig) -> str:
        """`native`, `vlmpipe` or the address of a template."""
        whole = model.pretrained
        is_chat_model = whole is not None and bool(whole.weights) and not model.tokenizer.startswith("train:")
        return self.chat_template or (NATIVE if is_chat_model else OWN_FORMAT)

    @model_validator(mode="after")
    def _has_sources(self) -> DataConfig:
        if bool(self.source) == bool(self.sources):
            raise ValueError(f"{'has source and sources' if self.source else 'has no source'}: expected one of the two")
        require_function(self.source, "source_arguments", self.source_arguments)
        if self.sources:
            _require_mixture(self)
        elif self.phases:
            raise ValueError("has phases without sources, whose weights they are")
        return self

    @field_validator("share_prefix", mode="before")
    @classmethod
    def _switched(cls, value: object) -> object:
        """The field was true or false, and records of runs from then are read."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("split_by")
    @classmethod
    def _has_such_a_field(cls, split_by: str, info: ValidationInfo) -> str:
        source = info.data.get("source", "")
        if split_by not in (BY_IMAGE, BY_RECORD) and source.startswith("builtin:"):
            raise ValueError(f"names a field of records, which {source} has none of: {BY_IMAGE} or {BY_RECORD}")
        return split_by


def _require_mixture(data: DataConfig) -> None:
    """Raise ValueError for sources that cannot be drawn from together."""
    names = [source.name for source in data.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"has two sources of one name: {', '.join(names)}")
    replayed = [source.name for source in data.sources if source.replay]
    if len(replayed) > 1 or len(replayed) == len(names):
        text = f"has {len(replayed)} sources with replay among {len(names)}: expected one, beside sources with images"
        raise ValueError(text)
    alone = [name for name in ("image_folder", "max_samples", "source_arguments") if getattr(data, name)]
    if alone:
        raise ValueError(f"has {alone[0]} next to sources: set it in each source")
    builtin = [source.uri for source in data.sources if source.uri.startswith("builtin:")]
    if builtin and data.split_by not in (BY_IMAGE, BY_RECORD):
        raise ValueError(f"is split by {data.split_by}, a field of records, which {builtin[0]} has none of")
    counted = [source.name for source in data.sources if source.samples is not None]
    if counted and data.train_share < 1:
        raise ValueError(
            f"has train_share {data.train_share:g} and a source with a number of samples an epoch, {counted[0]}: "
            "expected weights or epochs, or train_share 1"
        )
    weighted = [source.name for source in data.sources if source.weight is not None]
    drawn = [*weighted, *(s.name for s in data.sources if s.samples is not None or s.epochs is not None)]
    if data.phases and drawn:
        raise ValueError(
            f"has phases and a source with a weight or number of its own, {drawn[0]}: expected one of both"
        )
    if weighted and len(weighted) < len(names):
        without = next(name for name in names if name not in weighted)
        raise ValueError(f"has sources with weight, and {without} without: expected a weight for all of them or none")
    for phase in data.phases:
        _require_weights(phase.weights, names)
    if weighted and not any(source.weight for source in data.sources):
        raise ValueError("has weights that sum to nothing: expected at least one above 0")


def _require_weights(weights: dict[str, float], names: Sequence[str]) -> None:
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ValueError(f"has a phase with a weight for {unknown[0]}: expected the sources {', '.join(names)}")
    if not any(weights.values()):
        raise ValueError("has a phase whose weights sum to nothing: expected at least one above 0")
