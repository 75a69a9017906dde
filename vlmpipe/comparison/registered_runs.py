"""The runs of registered versions, by the registry of the runs that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.config.run_settings import RunSettings
from vlmpipe.registry.folder import FolderRegistry, Registry
from vlmpipe.registry.release import open_registry
from vlmpipe.trainer.config.job import run_uri_of
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri


def settings_of(run_uri: str) -> RunSettings:
    """The settings of a run of any version."""
    return RunSettings.read_of_any_version(open_storage(run_uri))


def registered_run_uri(model: str, which: str, settings: Sequence[RunSettings], root: str) -> str:
    """The folder of a registered version's run, by the registry of the runs beside it, or else the one under `root`."""
    registry: Registry = FolderRegistry(join_uri(root, "registry"), alias="champion" if which.isdigit() else which)
    runs_root = root
    for run in settings:
        register = run.register_ if which.isdigit() else run.register_.model_copy(update={"alias": which})
        registry, name, _ = open_registry(run.model_copy(update={"register_": register}))
        runs_root = run.run.root_uri
        if name == model:
            break
    entry = registry.version(model, int(which)) if which.isdigit() else registry.champion(model)
    if entry is None:
        raise UserError(
            f"no {model}@{which} in the registry",
            expected="MODEL@ALIAS or MODEL@VERSION of a registered model, such as digits@champion or digits@3",
            code=ExitCode.NOT_FOUND,
        )
    return run_uri_of(runs_root, entry.run_id, "")
