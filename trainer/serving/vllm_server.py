"""Program of the serving image: vLLM's server on local copies of folders in buckets, with a run's own settings.

    python -m vlmpipe.trainer.serving.vllm_server MODEL [--settings=FOLDER] [arguments of `vllm serve`]

Addresses in buckets (gs://, s3://) in the arguments become folders on this machine, because vLLM opens no adapter in a
bucket. `--settings` names the folder of a run's adapter: tokenizer, chat template, image processor and sampling
defaults are taken from there, as the evaluation took them. vLLM by itself takes them from the adapter's base.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors, run_main
from vlmpipe.trainer.storage.export_manifest import MARKER
from vlmpipe.trainer.storage.hub.client import whole_snapshot
from vlmpipe.trainer.storage.model_folders import CONFIG, INDEX, SETTINGS, WEIGHTS, bucket_address, local_folder

PROGRAM = ("vllm", "serve")
SETTINGS_OPTION, REVISION_OPTION = "--settings=", "--revision="
OF_ADAPTER = ("adapter_config.json", CONFIG, MARKER)  # beside its settings; the model's configuration is the base's
TOKENIZER = "tokenizer_config.json"
_ADDRESS = re.compile(r"(.*?)((?:gs|s3)://.*)", re.DOTALL)  # what an option's value ends with


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process by vLLM's server. Raises UserError where a folder cannot be read."""
    try:
        versions = ", ".join(f"{name} {version(name)}" for name in ("vllm", "transformers"))
    except PackageNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed here",
            expected="an image with vLLM, such as container/serving.Dockerfile builds",
            code=ExitCode.UNAVAILABLE,
        ) from error
    command = [*PROGRAM, *local_arguments(sys.argv[1:] if arguments is None else arguments)]
    print(f"{versions}: {' '.join(command)}", flush=True)
    with os_errors("starting vLLM"):
        os.execvp(command[0], command)


def local_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `vllm serve` for these, after fetching what they name: the model's folder comes first.

    Raises ConfigError for a folder without a model or not of the given revision, DataError for a damaged one.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"the first argument is {arguments[0] if arguments else 'missing'}",
            expected="the model: a folder, an address in a bucket, or an id of the Hugging Face hub",
        )
    model, settings, revision, others = arguments[0], "", "", list[str]()
    for argument in arguments[1:]:
        if argument.startswith(SETTINGS_OPTION):
            settings = argument.removeprefix(SETTINGS_OPTION)
        elif argument.startswith(REVISION_OPTION):
            revision = argument.removeprefix(REVISION_OPTION)
        else:
            others.append(_fetched(argument))
    if settings:
        base = local_folder(model, revision) or _of_hub(model, revision)
        return [str(served_folder(base, _folder(settings))), *others]
    if bucket_address(model):
        return [str(_folder(model, revision)), *others]
    return [model, *([f"{REVISION_OPTION}{revision}"] if revision else []), *others]


def served_folder(base: Path, settings: Path) -> Path:
    """A new folder with links to the weights and configuration of `base`, and to all settings of a run's adapter."""
    if not (settings / TOKENIZER).is_file():
        raise ConfigError(
            f"{settings} has no {TOKENIZER}",
            expected="the export of a run with model.lora.export adapter, with the settings that were evaluated",
        )
    if not (base / CONFIG).is_file():
        raise ConfigError(f"{base} has no {CONFIG}", expected="the base of the adapter, a model of transformers")
    with os_errors("making the folder that is served"):
        folder = Path(tempfile.mkdtemp(prefix="vlmpipe-served-"))
        _link(base, folder, lambda name: name == CONFIG or name.endswith((WEIGHTS, INDEX)))
        _link(settings, folder, lambda name: name.endswith(SETTINGS) and name not in OF_ADAPTER)
    return folder


def _link(source: Path, folder: Path, takes: Callable[[str], bool]) -> None:
    for path in sorted(source.iterdir()):
        if takes(path.name):
            (folder / path.name).symlink_to(path.resolve())


def _fetched(argument: str) -> str:
    """The argument with a folder on this machine in place of an address in a bucket."""
    match = _ADDRESS.fullmatch(argument)
    return argument if match is None else f"{match[1]}{_folder(match[2])}"


def _folder(name: str, revision: str = "") -> Path:
    folder = local_folder(name, revision)
    if folder is None:
        raise ConfigError(f"there is no folder {name}", expected="a folder on this machine or an address in a bucket")
    return folder


def _of_hub(name: str, revision: str) -> Path:
    """A copy of the weights and configuration of a model of the hub, in the hub's own cache."""
    if name.startswith(("/", ".", "~")):
        raise ConfigError(f"there is no folder {name}", expected="the base of the adapter")
    return whole_snapshot(name, revision, [CONFIG, f"*{WEIGHTS}", f"*{INDEX}"])


if __name__ == "__main__":
    sys.exit(run_main(main))
