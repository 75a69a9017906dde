"""Where samples come from: opens the source that the run file names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import BIGQUERY, function_named
from vlmpipe.trainer.data.sources.base import SeveralSources, Source
from vlmpipe.trainer.data.sources.builtin import BUILTIN_PREFIX
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.regular_files import open_regular

if TYPE_CHECKING:
    from vlmpipe.trainer.data.sources.file_patterns import Files

FOLDER_SUFFIXES = (".tar", ".parquet", ".arrow")  # that identify a folder's format
LINES = ".jsonl"  # of a folder that has none of these
FILE_SUFFIXES = (".json", ".jsonl", ".tar", ".parquet", ".arrow", ".csv", ".tsv")


def open_source(config: DataConfig) -> Source:
    """The source that `data.source` names, or those of `data.sources` as one: built-in sets, a table of BigQuery, a
    user's own function, or files, whose suffixes identify the format.

    Raises ConfigError for an unknown name or path, DataError for a file that does not hold samples, and UserError (exit
    69) for a Python package that is not installed.
    """
    if config.replay and not config.replay_folder:
        raise UserError(
            f"the answers of the start model, source {config.replay.name}, are not there yet",
            expected="those that a run generates before it prepares its data",
            fix="run the run file once",
            code=ExitCode.NOT_FOUND,
        )
    if config.sources:
        opened = {source.name: open_source(config.of_source(source)) for source in config.sources}
        return SeveralSources(opened, {source.name: source.max_samples for source in config.sources})
    if config.source.startswith(BIGQUERY):
        from vlmpipe.trainer.data.sources.bigquery import BigQuerySource

        return BigQuerySource(config)
    if function_named(config.source):
        from vlmpipe.trainer.data.sources.function import FunctionSource

        return FunctionSource(config)
    if not config.source.startswith(BUILTIN_PREFIX):
        return _open_files(config)
    builtin = _builtin_sources()
    name = config.source.removeprefix(BUILTIN_PREFIX)
    if name not in builtin:
        raise ConfigError(
            f"data.source {config.source!r} names no built-in set",
            expected="one of " + ", ".join(BUILTIN_PREFIX + known for known in builtin),
        )
    return builtin[name](config)


def _open_files(config: DataConfig) -> Source:
    from vlmpipe.trainer.data.sources.file_patterns import find_files

    files = find_files(config.source, config.shard_cache_gib)
    with files.naming_stand_ins():
        return _of_format(files, config)


def _of_format(files: Files, config: DataConfig) -> Source:
    from vlmpipe.trainer.data.sources.coco import CocoSource
    from vlmpipe.trainer.data.sources.image_folder import METADATA, ImageFolderSource
    from vlmpipe.trainer.data.sources.llava import LlavaSource
    from vlmpipe.trainer.data.sources.vlmevalkit import VlmEvalKitSource
    from vlmpipe.trainer.data.sources.webdataset import WebDatasetSource

    suffix = _suffix(files, METADATA)
    if suffix == ".tar":
        return WebDatasetSource(files.ending(suffix), config)
    if suffix in (".parquet", ".arrow"):
        from vlmpipe.trainer.data.sources.parquet import ParquetSource
        from vlmpipe.trainer.data.sources.split_names import without_caches

        data, left_out = without_caches(files) if suffix == ".arrow" and files.is_folder else (files, ())
        return ParquetSource(data.ending(suffix), config, left_out)
    if suffix == ".tsv":
        return VlmEvalKitSource(files, config)
    if suffix == ".csv":
        return ImageFolderSource(files.named(METADATA) if files.is_folder else files, config)
    if files.is_folder:
        files = files.ending(suffix)
    if suffix == ".json" and len(files.infos) == 1 and _begins_object(files):
        return CocoSource(files, config)
    return LlavaSource(files, config)


def _suffix(files: Files, metadata: str) -> str:
    """The suffix that identifies the files' format. Raises ConfigError when there is none, or more than one."""
    names = files.names
    if files.is_folder:
        suffixes = [suffix for suffix in FOLDER_SUFFIXES if any(name.endswith(suffix) for name in names)]
        suffixes += [".csv"] if metadata in names else []
        suffixes = suffixes or [LINES for name in names if name.endswith(LINES)][:1]
        expected = f"a folder with tars, with Parquet, Arrow or JSON lines files, or with {metadata}"
    else:
        suffixes = [suffix for suffix in FILE_SUFFIXES if any(name.endswith(suffix) for name in names)]
        odd = [name for name in names if not name.endswith(FILE_SUFFIXES)]
        expected = f"builtin:<name>, FILE.py:FUNCTION, or files that end in {', '.join(FILE_SUFFIXES)}"
        if odd:
            raise ConfigError(f"data.source {files.source!r} has an unknown format: {odd[0]}", expected=expected)
    if len(suffixes) != 1:
        what = " and ".join(suffixes) if suffixes else ", ".join(names[:5])
        raise ConfigError(
            f"data.source {files.source!r} holds {what}",
            expected=expected,
            fix="name the files themselves, with a pattern such as *.tar where there are many",
        )
    return suffixes[0]


def _begins_object(files: Files) -> bool:
    """Return whether a JSON file holds an object, as COCO's do, and not a list, as LLaVA's do."""
    from vlmpipe.trainer.data.text_files.json_stream import JsonReader

    path = files.path(files.names[0])
    with os_errors(f"reading {path}"), open_regular(path) as file:
        try:
            return JsonReader(file).peek() == "{"
        except UnicodeDecodeError:
            return False


def _builtin_sources() -> dict[str, Callable[[DataConfig], Source]]:
    from vlmpipe.trainer.data.sources.builtin.digit_mosaics import DigitMosaicsSource
    from vlmpipe.trainer.data.sources.builtin.digits import DigitsSource
    from vlmpipe.trainer.data.sources.builtin.easy_vqa import EasyVqaSource
    from vlmpipe.trainer.data.sources.builtin.openmoji import OpenMojiSource

    return {
        "digits": lambda config: DigitsSource(config.validation_fraction),
        "digit-mosaics": lambda config: DigitMosaicsSource(config.validation_fraction, one_question=False),
        "digit-mosaic-questions": lambda config: DigitMosaicsSource(config.validation_fraction, one_question=True),
        "easy-vqa": lambda config: EasyVqaSource(),
        "openmoji": lambda config: OpenMojiSource(),
    }
