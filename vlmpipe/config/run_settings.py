"""Settings of a run as the tool and the pipeline's steps read them: `run.json`.

Jobs read the same file as `vlmpipe.trainer.config.job.JobConfig`, which has only the sections that they know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Self

from pydantic import ConfigDict, ValidationError

from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.run_fields import RunFields
from vlmpipe.trainer.config.job import JobConfig, RunPaths, without_gone
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.record import of_another_version
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import RUN_FILE, read_as_written, read_record

STEP = "resolve-run"  # which writes the file


class RunSettings(RunFields):
    """The effective run file of a run, and where that run reads and writes.

    Rules between sections are not checked again: they may have changed since the run.
    """

    model_config = ConfigDict(extra="ignore")

    run: RunPaths

    @classmethod
    def of_record(cls, content: Mapping[str, object], uri: str) -> Self:
        """Return the settings with this content, which was read at `uri`.

        Raises ConfigError for those of another version, unless the fields that this one lacks did nothing.
        """
        try:
            return cls.model_validate(without_gone(content))
        except ValidationError as error:
            raise of_another_version(uri, error) from error

    @classmethod
    def read(cls, store: Storage) -> Self:
        """Read the settings of the run in `store`. Raises UserError where they are missing or damaged."""
        return cls.of_record(read_record(store, RUN_FILE), store.uri(RUN_FILE))

    @classmethod
    def read_of_any_version(cls, store: Storage) -> Self:
        """Read the settings without fields that this version does not know, to use those that all versions have.

        Raises as `read`, also for values that this version does not take.
        """
        content = without_gone(read_record(store, RUN_FILE))
        try:
            cls.model_validate(content)
        except ValidationError as error:
            content = _without_unknown(content, error)
        return cls.of_record(content, store.uri(RUN_FILE))

    @classmethod
    def require(cls, store: Storage) -> Self:
        """Read the settings. Raises ConfigError that names the step where there is no file, else as `read`."""
        if store.stat(RUN_FILE) is None:
            raise ConfigError(f"missing {store.uri(RUN_FILE)}, which the step {STEP} writes", fix="run that step first")
        return cls.read(store)

    def job(self) -> JobConfig:
        """Return the settings as the run's jobs read them."""
        return JobConfig.model_validate(self.to_dict())


def _without_unknown(content: Mapping[str, object], error: ValidationError) -> dict[str, object]:
    unknown = {problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"}

    def known(value: object, place: tuple[int | str, ...] = ()) -> object:
        if isinstance(value, dict):
            return {
                name: known(below, (*place, name)) for name, below in value.items() if (*place, name) not in unknown
            }
        if isinstance(value, list):
            return [known(item, (*place, index)) for index, item in enumerate(value)]
        return value

    return {name: known(section, (name,)) for name, section in content.items()}


def run_config_of(store: Storage) -> RunConfig:
    """Return the run file of the run in `store`, with all rules checked."""
    return RunConfig.model_validate(_sections(read_record(store, RUN_FILE)))


def earlier_run_file(store: Storage, *, as_written: bool = False) -> RunConfig:
    """Return the run file of an earlier start of the run in `store`. Raises ConfigError for that of another version.

    as_written: with the addresses of then, where the folder of runs was moved since.
    """
    content = (read_as_written if as_written else read_record)(store, RUN_FILE)
    return parse_run_config(without_gone(_sections(content)), store.uri(RUN_FILE))


def _sections(content: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in content.items() if name != "run"}


def run_sha256(store: Storage) -> str:
    """Return the sha256 of a run's run.json, whichever submission wrote it and wherever the folder of runs lies."""
    content = read_record(store, RUN_FILE)
    content["run"].pop("submission", None)
    text = json.dumps(_from_root(content, content["run"]["root_uri"]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_root(value: object, root: str) -> object:
    """The value with addresses under `root` as they are seen from there."""
    if isinstance(value, dict):
        return {name: _from_root(below, root) for name, below in value.items()}
    if isinstance(value, list):
        return [_from_root(below, root) for below in value]
    if isinstance(value, str) and (value == root or value.startswith(f"{root}/")):
        return f"ROOT{value[len(root) :]}"
    return value
