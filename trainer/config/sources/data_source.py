"""A source of samples: its address, the names of its records' keys, and how much of it is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from vlmpipe.trainer.config.base import Fraction, NonNegative, Positive, Section, StorageUri, storage_uri
from vlmpipe.trainer.config.model import IMAGE_TOKEN

BIGQUERY = "bq://"  # begins the address of a table
# Project, dataset and table by the comments of TableReference: a project may have a domain, a table a partition.
TABLE = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]\.[A-Za-z0-9_]{1,1024}\.[\w -]{1,1024}(\$\w+)?")


def function_named(uri: str) -> tuple[str, str] | None:
    """Return the module, or the address of its file, and the function of a source; None for other sources."""
    module, _, name = uri.rpartition(":")
    is_module = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return (module, name) if is_module and name.isidentifier() and module != "builtin" else None


def source_uri(value: str) -> str:
    """Raise ValueError for a source that is no table of BigQuery, function or address that `open_storage` opens."""
    if named := function_named(value):
        module, name = named
        return f"{storage_uri(module)}:{name}"
    if not value.startswith(BIGQUERY):
        return storage_uri(value)
    if not TABLE.fullmatch(value.removeprefix(BIGQUERY)):
        raise ValueError("expected bq://PROJECT.DATASET.TABLE, such as bq://my-project.my_data.samples")
    return value


SourceUri = Annotated[str, AfterValidator(source_uri)]


class Columns(Section):
    """Names of a record's keys or columns, where they differ from those that are read."""

    image: tuple[str, ...] = Field((), description="Keys of images or of image paths, in order.")
    question: str = Field("", description="Key of the question.")
    answer: str = Field(
        "", description="Key of the answer; without a question key, of the answer to data.caption_question."
    )
    messages: str = Field("", description="Key of the conversation, a list of messages.")
    id: str = Field("", description="Key of the id.")
    split: str = Field("", description="Key of the split.")
    weight: str = Field("", description="Key of a weight. A record whose weight is not 1 is rejected.")
    ignored: tuple[str, ...] = Field(
        (),
        description="Keys that are not needed, also in messages and their parts. Media in them does not end the step.",
    )

    @field_validator("image", "ignored", mode="before")
    @classmethod
    def _one_or_many(cls, names: object) -> object:
        return (names,) if isinstance(names, str) and names else names or ()

    def named(self) -> dict[str, str]:
        """The keys that are read under another name, by that name, but for images."""
        names = {name: getattr(self, name) for name in ("question", "answer", "messages", "id", "split", "weight")}
        return {name: key for name, key in names.items() if key}


REPLAY_PROMPTS = (  # general ones: what a model is asked that is to keep what it knows
    "Describe this image in one sentence.",
    "What is the main thing in this image?",
    "Which colours does the image show?",
    "How many things can be seen in the image?",
    "Is there any text in the image? If so, what does it say?",
    "What stands out in this image?",
    "What is in the background of the image?",
    "What kind of image is this?",
)
ONLY_WITH_URI = ("image_folder", "caption_question", "columns", "arguments", "max_samples")


class DataSource(Section):
    """One of several sources of samples."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="Name of the source, the prefix of its samples' ids and slices.",
    )
    uri: SourceUri = Field("", description="Address of the source; see data.source. Either this or replay is needed.")
    replay: Literal["self"] | None = Field(
        None,
        description="self: answers of the model that the run starts from, generated once before the data is prepared; "
        "null for a source with an address.",
    )
    replay_about: Literal["auto", "start_data", "images"] = Field(
        "auto",
        description="Subject of the questions. start_data: questions and images of its own training data, "
        "the prepared data of the run whose export it is. images: replay_prompts about training images of the other "
        "sources. auto is start_data where that data is there and replay_prompts is not given, else images.",
    )
    replay_images: Fraction = Field(
        0.25, gt=0, description="Questions for the start model, as a share of the other sources' training images."
    )
    replay_prompts: tuple[Annotated[str, Field(min_length=1)], ...] | StorageUri = Field(
        REPLAY_PROMPTS,
        description="Questions about training images of the other sources, of which each image gets one: a list, or a "
        "text file with one a line, local or in a bucket. The default has eight general ones.",
    )
    replay_max_new_tokens: Positive = Field(
        64, description="Tokens of a generated answer; longer ones are left out of the source, and counted."
    )
    replay_seed: int = Field(
        0, ge=0, description="Seed of the choice of images and questions. Set it to repeat a run with another choice."
    )
    image_folder: StorageUri = Field(
        "", description="Folder that image paths in records are relative to; see data.image_folder."
    )
    caption_question: str = Field(
        "", description="Question about an image that has a caption only; empty takes data.caption_question."
    )
    columns: Columns = Field(Columns(), description="Names of the records' keys or columns; empty takes data.columns.")
    arguments: dict[str, str | int | float | bool] = Field(
        {}, description="Arguments of a source that is a function; see data.source_arguments."
    )
    max_samples: int = Field(0, ge=0, description="Use only the first N samples; 0 is all.")
    weight: NonNegative | None = Field(
        None, description="Share of the samples that are drawn, relative to the weights of the other sources."
    )
    samples: Positive | None = Field(
        None,
        description="Samples drawn in an epoch. Each epoch continues where the last one stopped, and wraps at "
        "the end of the source.",
    )
    epochs: float | None = Field(
        None, gt=0, description="Passes over the source in an epoch of the run, such as 0.5 or 3; null is 1."
    )
    license: str = Field("", description="Licence of the data, which the model card names.")

    @property
    def address(self) -> str:
        """Where its samples are from, for people."""
        return self.uri or f"replay:{self.replay}"

    @property
    def why_about_images(self) -> str:
        """Why prompts about the other sources' images are asked, whatever the start model; empty where it decides."""
        if self.replay_about == "images":
            return "replay_about is images"
        return "replay_prompts is given" if self.replay_prompts != REPLAY_PROMPTS else ""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> DataSource:
        if bool(self.uri) == bool(self.replay):
            raise ValueError(f"has {'uri and replay' if self.uri else 'no uri'}: expected one of uri and replay: self")
        # Not by what was set: a run's record holds every field.
        changed = [name for name, field in DataSource.model_fields.items() if getattr(self, name) != field.default]
        if self.replay and (refused := [name for name in ONLY_WITH_URI if name in changed]):
            raise ValueError(f"has {refused[0]} with replay: expected replay_images and replay_prompts refused")
        if self.uri and (refused := sorted(name for name in changed if name.startswith("replay_"))):
            raise ValueError(f"has {refused[0]} without replay, whose setting it is: expected replay: self")
        _require_prompts(self.replay_prompts)
        if self.replay_about == "start_data" and self.why_about_images:
            raise ValueError("has replay_prompts with replay_about start_data, whose questions are asked: expected one")
        return self

    @model_validator(mode="after")
    def _has_arguments_of_a_function(self) -> DataSource:
        require_function(self.uri, "arguments", self.arguments)
        return self

    @model_validator(mode="after")
    def _is_drawn_in_one_way(self) -> DataSource:
        draws = [name for name in ("weight", "samples", "epochs") if getattr(self, name) is not None]
        if len(draws) > 1:
            raise ValueError(f"has {' and '.join(draws)}: expected one of weight, samples and epochs")
        return self


def _require_prompts(prompts: tuple[str, ...] | str) -> None:
    if not prompts:
        raise ValueError("replay_prompts is empty: expected questions, or the address of a text file with them")
    if marked := [prompt for prompt in prompts if IMAGE_TOKEN in prompt] if isinstance(prompts, tuple) else []:
        raise ValueError(f"replay_prompts has {marked[0]!r}: expected questions without {IMAGE_TOKEN}, which is added")


def require_function(uri: str, field: str, arguments: Mapping[str, object]) -> None:
    """Raise ValueError for arguments of a source that takes none."""
    if arguments and uri and not function_named(uri):
        raise ValueError(f"has {field}, which {uri} takes none of: expected MODULE:FUNCTION or FILE.py:FUNCTION")
