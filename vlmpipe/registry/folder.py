"""The model registry: numbered versions of a model, and which of them is in use (the champion).

`Registry` is the interface; `vlmpipe.registry.vertex` uses Vertex AI Model Registry, `FolderRegistry` a folder or
bucket, safe for several pipelines at once:

    <root>/<model>/versions/000001/CLAIM     the run of this number; create-only, so that a number is given once
    <root>/<model>/claims/000001-...         the same as a name, for lists (`vlmpipe.registry.claims`)
    <root>/<model>/versions/000001/model/    a copy of the export: the registry stays complete when the run is deleted
    <root>/<model>/versions/000001/model-int4/  likewise, of a quantized export
    <root>/<model>/versions/000001.json      the entry, created last: a version exists when its entry does
    <root>/<model>/CHAMPION                  the version in use, moved only by compare-and-swap
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from pydantic import ConfigDict, Field, ValidationError

from vlmpipe.records.decision import Champion
from vlmpipe.registry.claims import Claims
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage, VersionConflictError, crc32c_of_file
from vlmpipe.trainer.storage.records import read_record, seal

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MODEL_CARD = "README.md"


class ModelFile(Section):
    """One file of a registered model, with the checksum that was computed while it was copied."""

    name: str
    size_bytes: int
    crc32c: int


class Candidate(Section):
    """A model to register: its export and its metadata."""

    run_id: str
    export_uri: str
    checkpoint: str = Field("", description="Checkpoint that the export was made from.")
    metrics: dict[str, object] = Field(description="evaluate.json of the run.")
    data_fingerprint: str = Field("", description="Fingerprint of the prepared data.")
    config_digest: str = Field("", description="sha256 of run.json without its submission.")
    base: str = Field("", description="The model that an adapter belongs to, with its revision; empty for a model.")
    quantized: dict[str, str] = Field(default_factory=dict, description="Folders of its quantized exports, by format.")


class Entry(Section):
    """One registered version."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # a newer program may have written more

    format: int = 1
    model: str
    version: int
    created: str = Field(description="Time of registration, UTC, ISO 8601.")
    run_id: str
    model_uri: str
    checkpoint: str = ""
    metrics: dict[str, object]
    data_fingerprint: str = ""
    config_digest: str = ""
    base: str = ""
    quantized: dict[str, str] = Field(default_factory=dict, description="Copies of its quantized exports, by format.")
    files: tuple[ModelFile, ...]
    resource: str = Field("", description="Name of the version on Vertex AI, where the registry is there.")

    def as_champion(self) -> Champion:
        """The values that the gate compares with."""
        share = self.metrics.get("exact_match")
        exact_match = share if isinstance(share, float | int) and not isinstance(share, bool) else None
        return Champion(version=self.version, run_id=self.run_id, checkpoint=self.checkpoint, exact_match=exact_match)


class Registry(Protocol):
    """Functions of a model registry that the pipeline needs."""

    def champion(self, model: str) -> Entry | None: ...
    def version(self, model: str, number: int) -> Entry | None: ...
    def register(self, model: str, candidate: Candidate, model_card: str) -> Entry: ...
    def promote(self, model: str, version: int, *, instead_of: int | None) -> None: ...


@runtime_checkable
class MadeContainers(Protocol):
    """A registry whose versions have containers of their own, by which they are served."""

    def arguments(self, number: int) -> tuple[str, ...]: ...


class Export:
    """The files of a candidate's exported model. Raises ConfigError when there are none."""

    def __init__(self, candidate: Candidate) -> None:
        self._store = open_storage(candidate.export_uri)
        self._files = [info for info in self._store.list() if info.name != MODEL_CARD]
        if not self._files:
            raise ConfigError(
                f"run {candidate.run_id} has no exported model in {candidate.export_uri}",
                expected="a Hugging Face model folder",
                fix="run the step sync_checkpoint first",
            )

    def copy(self, store: Storage, folder: str, model_card: str) -> tuple[ModelFile, ...]:
        """Copy an export and `model_card` into `folder` of `store`, replacing what an earlier attempt left there."""
        files = []
        for info in self._files:
            path = self._store.fetch(info.name)
            store.upload(path, f"{folder}/{info.name}")
            files.append(ModelFile(name=info.name, size_bytes=info.size_bytes, crc32c=crc32c_of_file(path)))
        store.write(f"{folder}/{MODEL_CARD}", model_card.encode())
        return tuple(files)


def copy_quantized(candidate: Candidate, store: Storage, folder: str, model_card: str) -> dict[str, str]:
    """Copy the candidate's quantized exports next to `folder` of `store`, its model's. Returns their addresses."""
    copies: dict[str, str] = {}
    for form, uri in candidate.quantized.items():
        target = f"{folder}-{form}"
        Export(candidate.model_copy(update={"export_uri": uri})).copy(store, target, model_card)
        copies[form] = store.uri(target)
    return copies


class FolderRegistry:
    """A registry in a local folder or a bucket."""

    def __init__(self, root_uri: str, *, alias: str = "champion") -> None:
        """`alias` names the pointer to the version in use; each alias moves on its own."""
        self._store: Storage = open_storage(root_uri)
        self._pointer = alias.upper()

    def champion(self, model: str) -> Entry | None:
        """The version in use, or None before the first one."""
        version, _ = self._read_pointer(model)
        return None if version is None else self._entry(_folder(model), version)

    def version(self, model: str, number: int) -> Entry | None:
        """The version of this number, or None where there is none."""
        folder = _folder(model)
        return self._entry(folder, number) if self._store.stat(_entry_name(folder, number)) else None

    def run_ids(self, model: str) -> dict[int, str]:
        """The runs that versions were made of, or are being made of, without a request for each version.

        A version whose folder was removed by hand counts until its claim is removed, too.
        """
        return {number: owner.run_id for number, owner in Claims(self._store, _folder(model)).taken().items()}

    def versions(self, model: str) -> list[Entry]:
        """All complete versions, oldest first. Each is read."""
        folder = _folder(model)
        names = (info.name for info in self._store.list(f"{folder}/versions"))
        entries = filter(None, (re.fullmatch(r".*/versions/(\d{6,})\.json", name) for name in names))
        return [self._entry(folder, number) for number in sorted(int(result[1]) for result in entries)]

    def register(self, model: str, candidate: Candidate, model_card: str) -> Entry:
        """Copy the candidate's export and `model_card` into a new version.

        A checkpoint of a run has one version: registering it again returns that version, or completes it where an
        earlier attempt stopped half-way. A run that has trained on offers another checkpoint, which becomes a version
        of its own. Raises ConfigError where there is no export.
        """
        folder = _folder(model)
        export = Export(candidate)
        number = Claims(self._store, folder).take(candidate.run_id, candidate.checkpoint)
        name = f"{folder}/versions/{number:06d}"
        if self._store.stat(f"{name}.json") is None:
            files = export.copy(self._store, f"{name}/model", model_card)
            quantized = copy_quantized(candidate, self._store, f"{name}/model", model_card)
            entry = Entry(
                model=model,
                version=number,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                model_uri=self._store.uri(f"{name}/model"),
                files=files,
                quantized=quantized,
                **candidate.model_dump(exclude={"export_uri", "quantized"}),
            )
            with contextlib.suppress(AlreadyExistsError):  # another attempt of this run was faster, with the same files
                self._store.create(f"{name}.json", seal(entry.model_dump(mode="json"), indent=1))
        return self._entry(folder, number)

    def promote(self, model: str, version: int, *, instead_of: int | None) -> None:
        """Make `version` the champion if the champion still is `instead_of` (None: there is none yet).

        A model that was compared with version 3 must not replace version 4. Promoting the champion again changes
        nothing.
        """
        folder = _folder(model)
        entry = self._entry(folder, version)
        current, token = self._read_pointer(model)
        if current == version:
            return
        data = seal({"version": version, "run_id": entry.run_id})
        try:
            if current != instead_of:
                raise VersionConflictError(folder)
            if token is None:
                self._store.create(f"{folder}/{self._pointer}", data)
            else:
                self._store.replace(f"{folder}/{self._pointer}", data, token)
        except (AlreadyExistsError, VersionConflictError) as error:
            now, _ = self._read_pointer(model)
            raise overtaken(self._pointer.lower(), model, now, version, instead_of) from error

    def _entry(self, folder: str, version: int) -> Entry:
        name = _entry_name(folder, version)
        if self._store.stat(name) is None:
            raise ConfigError(f"no version {version} in the registry: {self._store.uri(name)} is missing")
        try:
            return Entry.model_validate(read_record(self._store, name))
        except ValidationError as error:
            raise ConfigError(
                f"{self._store.uri(name)} is not a registry entry: {error.errors()[0]['msg']}",
                fix="restore the file from a backup, or remove the version's folder, this file and its name in claims/",
            ) from error

    def _read_pointer(self, model: str) -> tuple[int | None, str | None]:
        """Version number and storage version of the pointer. The latter is read first: a move in between then shows."""
        name = f"{_folder(model)}/{self._pointer}"
        info = self._store.stat(name)
        if info is None:
            return None, None
        version = read_record(self._store, name).get("version")
        if not isinstance(version, int) or version < 1:
            raise ConfigError(
                f"{self._store.uri(name)} names no version: {version!r}",
                expected="the number of a version that is in use",
                fix="restore the file from a backup, or delete it: the model then has none in use",
            )
        return version, info.version


def _folder(model: str) -> str:
    if not MODEL_NAME.fullmatch(model):
        raise ConfigError(
            f"model name {model!r} cannot be used",
            expected="letters, digits, '.', '_' and '-', starting with a letter or digit, 128 at most",
            fix="set register.model_name",
        )
    return model


def _entry_name(folder: str, version: int) -> str:
    return f"{folder}/versions/{version:06d}.json"


class OvertakenError(UserError):
    """A promotion whose comparison is out of date: another run was promoted since (exit 75)."""


def overtaken(alias: str, model: str, now: int | None, version: int, instead_of: int | None) -> OvertakenError:
    return OvertakenError(
        f"the {alias} of model {model!r} is version {now}, but version {version} was compared "
        f"with {'none' if instead_of is None else f'version {instead_of}'}: another run was faster",
        expected="a comparison with the model in use",
        fix="continue the run: its gate decides again, against the model now in use, and nothing is trained again",
        code=ExitCode.PREEMPTED,
    )
