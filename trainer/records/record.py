"""Base of a run's records.

A record is one type with one file name. It reads and writes the file itself, so that a key's name stands in one module
(docs/decisions/0196).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record, seal, write_record

SHOWN_FIELDS = 5  # of a record that another version wrote


class Part(BaseModel):
    """An object inside a record: frozen; a field that this version does not know is left out.

    Null, as programs write it for nothing, is a field's default.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: object) -> object:
        if not isinstance(content, Mapping):
            return content
        fields = cls.model_fields
        return {name: value for name, value in content.items() if value is not None or _may_be_null(fields.get(name))}


def _may_be_null(field: FieldInfo | None) -> bool:
    return field is None or field.default is None


class Record(Part):
    """A file of a run's folder.

    FILE: its name there. STEP: the step that writes it. VERSION: the newest form that this version reads; a record of
    the first form has no `record_version` on disk.
    """

    FILE: ClassVar[str]
    STEP: ClassVar[str]
    VERSION: ClassVar[int] = 1
    INDENT: ClassVar[int | None] = 1
    IS_SPARSE: ClassVar[bool] = False  # fields that were not set are not written

    record_version: int = Field(1, ge=1, description="Form of the record.")

    @classmethod
    def of(cls, content: Mapping[str, object], uri: str) -> Self:
        """Return the record with this content, read at `uri`. Raises ConfigError for that of another version."""
        try:
            record = cls.model_validate(content)
        except ValidationError as error:
            raise of_another_version(uri, error) from error
        if record.record_version > cls.VERSION:
            raise ConfigError(
                f"{uri} has record_version {record.record_version}",
                expected=f"at most {cls.VERSION}, which vlmpipe {__version__} reads",
                fix="use the vlmpipe that made the run",
            )
        return record

    @classmethod
    def read(cls, store: Storage) -> Self:
        """Read the record of the run in `store`. Raises UserError where it is missing, damaged, or cannot be read."""
        return cls.of(read_record(store, cls.FILE), store.uri(cls.FILE))

    @classmethod
    def read_if_there(cls, store: Storage) -> Self | None:
        """Read the record, or return None where there is no file. Raises as `read`."""
        return None if store.stat(cls.FILE) is None else cls.read(store)

    @classmethod
    def read_if_whole(cls, store: Storage) -> Self | None:
        """Read the record, or return None where there is none, or one that is damaged or of another version."""
        try:
            return cls.read_if_there(store)
        except (ConfigError, DataError):
            return None

    @classmethod
    def require(cls, store: Storage) -> Self:
        """Read the record. Raises ConfigError that names the step where there is no file, else as `read`."""
        if store.stat(cls.FILE) is None:
            raise ConfigError(
                f"missing {store.uri(cls.FILE)}, which the step {cls.STEP} writes", fix="run that step first"
            )
        return cls.read(store)

    def as_json(self) -> dict[str, object]:
        """Return the fields that were set, as JSON: of a record that was read, the file's."""
        return self.model_dump(exclude_unset=True)

    def content(self) -> dict[str, object]:
        """Return what the file holds."""
        left_out = {"record_version"} if self.record_version == 1 else None
        return self.model_dump(exclude=left_out, exclude_unset=self.IS_SPARSE)

    def write(self, store: Storage) -> None:
        write_record(store, self.FILE, self.content(), indent=self.INDENT)

    def sealed(self) -> bytes:
        """Return the file's bytes. Raises ValueError for a number that is not finite."""
        return seal(self.content(), indent=self.INDENT, allow_nan=False)


RUN_AGAIN = "use the vlmpipe that made the run, or run its run file again"


def of_another_version(uri: str, error: ValidationError, fix: str = RUN_AGAIN) -> ConfigError:
    """Return the error for a record at `uri` whose fields are not those of this version."""
    fields = [".".join(map(str, problem["loc"])) for problem in error.errors()]
    more = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
    return ConfigError(
        f"{uri} is not of this version of vlmpipe, by {', '.join(fields[:SHOWN_FIELDS])}{more}",
        expected=f"a run of vlmpipe {__version__} as it is installed here",
        fix=fix,
    )
