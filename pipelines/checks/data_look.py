"""Checks of a run file's sources, as far as they are on this machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from vlmpipe.planner.chat_template import is_here
from vlmpipe.trainer.config.sources.data_source import BIGQUERY, function_named
from vlmpipe.trainer.data.tokenize import TRAINED_PREFIX
from vlmpipe.trainer.errors import DataError, ExitCode
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.trainer.config.data import DataConfig
    from vlmpipe.trainer.data.prepare.validation.validate_sample import SampleValidator

NOT_OF_SAMPLES = {"lora", "freeze", "freeze_parameters", "train_parameters", "seed"}  # of the model section


def look_at_source(
    config: RunConfig, data: DataConfig, sources: int
) -> tuple[Literal["ok", "warning", "failed", "unchecked"], str, int]:
    """How one of `sources` sources looks, a sentence for people, and the exit code of a failure.

    `data`: the run file's section, with this source alone. Raises what reading the source raises.
    """
    if in_bucket(data.source) or data.source.startswith(BIGQUERY):
        return "unchecked", f"{data.source} is read when the run starts", ExitCode.OK
    from vlmpipe.trainer.data.prepare.look import BUDGET_S, look_at
    from vlmpipe.trainer.data.sources import open_source
    from vlmpipe.trainer.data.sources.builtin import BUILTIN_PREFIX, require_builtin

    if data.source.startswith(BUILTIN_PREFIX):
        require_builtin(data.source)
        return "ok", f"{data.source} comes inside an installed package", ExitCode.OK
    source = open_source(data)
    look = look_at(source, data, _local_validator(config, data), budget_s=BUDGET_S / sources)
    state, text, code = look.verdict(data)
    try:
        look.coverage.check_columns(data.source)
    except DataError as error:
        if state != "failed":
            may_be_met = look.is_part or (sources > 1 and data.columns == config.data.columns)  # elsewhere
            return ("warning", error.text(), ExitCode.OK) if may_be_met else ("failed", error.text(), int(error.code))
    return state, text, code


def module_of(data: DataConfig) -> str:
    """The installed module of a source that is a function; "" for a file, and for other sources."""
    module, _ = function_named(data.source) or ("", "")
    return "" if module.endswith(".py") else module


def has_module(name: str) -> bool:
    """Return whether this Python finds the module. Packages above it are imported, and may fail: it is there then."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        return not f"{name}.".startswith(f"{error.name}.")  # else a package above it imports what is not here
    except (Exception, SystemExit):  # of a user's package; whoever imports the module reports it
        return True


def _local_validator(config: RunConfig, data: DataConfig) -> SampleValidator | None:
    """The checks of preparation, with tokens; None where the tokenizer is trained on the data or on another machine.

    `data`: the run file's section, with one of its sources. Raises ConfigError for a template that cannot be used.
    """
    tokenizer = config.model.tokenizer
    elsewhere = in_bucket(data.chat_format(config.model)) or not is_here(config.model, tokenizer)
    if tokenizer.startswith(TRAINED_PREFIX) or elsewhere:
        return None
    from vlmpipe.trainer.config.job import JobConfig, RunPaths
    from vlmpipe.trainer.data.chat.run_chat import make_chat
    from vlmpipe.trainer.data.prepare.validation.validate_sample import SampleValidator

    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="check", root_uri="check")))
    return SampleValidator(job.model_copy(update={"data": data}), make_chat(config.model, data, ()))


def samples_of(run: RunConfig) -> tuple[object, ...]:
    """Settings that decide the samples of a run, whose check takes seconds."""
    return run.data, run.train.in_pairs, run.model.model_dump(exclude=NOT_OF_SAMPLES)
