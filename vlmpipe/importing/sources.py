"""Sources of an import: reading them, and finding their kind by the content alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from vlmpipe.config.file_kinds import is_html
from vlmpipe.config.yaml_loader import read_text
from vlmpipe.importing.json_with_comments import without_comments
from vlmpipe.importing.launch_command import CONTINUED, LAUNCHERS, SELF_STARTING, words_of_text
from vlmpipe.importing.listings.python_listing import read_listing
from vlmpipe.importing.settings.deepspeed import is_deepspeed
from vlmpipe.importing.settings.words import table_of
from vlmpipe.importing.yaml_aliases import parse_with_aliases
from vlmpipe.job_spec.schema import snake_case
from vlmpipe.trainer.errors import ConfigError

EXPECTED = (
    "a job spec or a list of worker pools (YAML, JSON or the Python that makes it), a ds_config.json, a command such "
    "as torchrun ..., or settings of TRL, LLaMA-Factory, Axolotl, accelerate or TrainingArguments"
)
FIX = "vlmpipe docs from-a-guide shows one of each; --command 'torchrun ...' takes a command itself"
_JOB_KEYS = {"worker_pool_specs", "job_spec", "trial_job_spec"}
_LAUNCHERS = (*LAUNCHERS, *SELF_STARTING, "python", "python3", "trl", "nohup")


_OF_THE_SHELL = ("set", "cd", "export", "source", "pip", "module", "echo", "mkdir", "conda", "if", "then", "else", "fi")


class Kind(StrEnum):
    """Kind of a source."""

    JOB_SPEC = "a job spec"
    PYTHON = "a Python listing of a job spec"
    DEEPSPEED = "a DeepSpeed configuration"
    COMMAND = "a command"
    TRL = "settings of TRL"
    LLAMA_FACTORY = "settings of LLaMA-Factory"
    AXOLOTL = "settings of Axolotl"
    ACCELERATE = "a configuration of accelerate"
    TRANSFORMERS = "settings of transformers' Trainer"


@dataclass(frozen=True)
class Source:
    """Source of an import. `name` is the file's or the option's; `content` is nested values, or a command's text."""

    name: str
    kind: Kind
    content: Mapping[str, object] | list[object] | str
    not_literal: Mapping[str, str] = field(default_factory=dict)  # of a listing: path -> source text
    folders: tuple[Path, ...] = ()  # where files are opened that the content names


def read_source(path: Path) -> Source:
    """Read a file. Raises ConfigError for one that is too large, not regular, no text, or of no known kind."""
    source = source_of(read_text(path, "a text file of a guide"), path.name)
    return replace(source, folders=tuple(dict.fromkeys((path.parent, Path()))))


def command_source(text: str) -> Source:
    """The words of a command that was typed. Raises ConfigError where there are none."""
    if not words_of_text(text):
        raise ConfigError("--command holds no command", expected="such as 'torchrun --nproc_per_node=8 train.py'")
    return Source("--command", Kind.COMMAND, text, folders=(Path(),))


def source_of(text: str, name: str) -> Source:
    """The kind of a text. Raises ConfigError for none, or for YAML that cannot be read."""
    if is_html(text):
        raise ConfigError(f"{name} is a page for a browser", expected=EXPECTED, fix=FIX)
    if not text.strip():
        raise ConfigError(f"{name} is empty", expected=EXPECTED, fix=FIX)
    if text.lstrip()[0] in "{[":
        return _of_content(_parsed_json(text, name), name)
    if _is_command(text):
        return Source(name, Kind.COMMAND, text)
    if _is_python(text):
        listing = read_listing(text, name)
        return Source(name, Kind.PYTHON, listing.content, listing.not_literal)
    return _of_content(parse_with_aliases(text, name), name)


def _parsed_json(text: str, name: str) -> object:
    """JSON, also with comments; else YAML, which has braces too. A key that is given twice is an error."""
    for attempt in (text, without_comments(text)):
        try:
            content = json.loads(attempt)
        except (json.JSONDecodeError, RecursionError):
            continue
        return (
            parse_with_aliases(json.dumps(content), name)
            if _has_no_duplicates(attempt)
            else parse_with_aliases(attempt, name)
        )
    return parse_with_aliases(text, name)


def _has_no_duplicates(text: str) -> bool:
    counts: list[bool] = []
    json.loads(text, object_pairs_hook=lambda pairs: counts.append(len({name for name, _ in pairs}) == len(pairs)))
    return all(counts)


def _of_content(content: object, name: str) -> Source:
    if isinstance(content, list) and content and all(isinstance(pool, Mapping) for pool in content):
        return Source(name, Kind.JOB_SPEC, content)
    if isinstance(content, Mapping) and content:
        return Source(name, _kind_of(content, name), content)
    raise ConfigError(f"{name} is of no kind that can be imported", expected=EXPECTED, fix=FIX)


def _kind_of(content: Mapping[str, object], name: str) -> Kind:
    keys = {snake_case(str(key)) for key in content}
    if keys & _JOB_KEYS or keys & {"worker_pools", "custom_job"}:
        return Kind.JOB_SPEC
    if any(isinstance(section, Mapping) and "_component_" in section for section in content.values()):
        raise ConfigError(f"{name} is a configuration of torchtune, which is not imported", expected=EXPECTED, fix=FIX)
    if keys & {"compute_environment", "distributed_type"}:
        return Kind.ACCELERATE
    if is_deepspeed(content):
        return Kind.DEEPSPEED
    if keys & {"model", "train", "data"} == {"model", "train", "data"}:
        raise ConfigError(f"{name} is a run file", expected=EXPECTED, fix=f"vlmpipe check {name}")
    if keys & {"base_model", "sequence_len", "micro_batch_size"} and keys & {"datasets", "adapter", "num_epochs",
                                                                           "sequence_len", "base_model"}:  # fmt: skip
        return Kind.AXOLOTL
    if keys & {"finetuning_type", "cutoff_len", "stage", "lora_target", "freeze_vision_tower", "dataset_dir"}:
        return Kind.LLAMA_FACTORY
    if keys & {"use_peft", "lora_target_modules", "dataset_name", "max_length", "packing", "assistant_only_loss",
               "lora_r", "attn_implementation"}:  # fmt: skip
        return Kind.TRL
    if len(keys & table_of("transformers").keys()) >= min(2, len(keys)):
        return Kind.TRANSFORMERS
    raise ConfigError(f"{name} is of no kind that can be imported", expected=EXPECTED, fix=FIX)


def _is_command(text: str) -> bool:
    """Return whether the first words that are no comments, options of the shell or variables start a program."""
    if re.match(r"#!.*sh\b", text):
        return True
    for line in CONTINUED.sub(" ", text).splitlines():
        words = line.split("#")[0].split()
        if not words or words[0] in _OF_THE_SHELL or re.match(r"[A-Za-z_]\w*=(\$\(|[\"'])", line):
            continue
        program = next((word for word in words if "=" not in word), "")
        if not program:
            continue
        return program.rpartition("/")[2].rstrip("\\") in _LAUNCHERS and not program.endswith(":")
    return False


def _is_python(text: str) -> bool:
    marks = ("worker_pool_specs", "CustomJob", "CustomContainerTrainingJob", "CustomTrainingJob", "aiplatform",
             "CustomPythonPackageTrainingJob", "\nimport ", "\ndef ", "\nclass ")  # fmt: skip
    head = f"\n{text}"
    begins = any(head.startswith(f"\n{word} ") or f"\n{word} " in head for word in ("import", "from", "def", "class"))
    assigns = any(line.partition("=")[0].strip().isidentifier() and "=" in line for line in text.splitlines())
    return (begins or assigns) and any(mark in head for mark in marks) and "worker_pool_specs:" not in text
