"""Settings in files that a command or other settings name: of DeepSpeed, accelerate and training programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmpipe.importing.findings import Outcome, Path, leaves
from vlmpipe.importing.named_files import NamedFiles, NotOpenedError
from vlmpipe.importing.settings.concepts import Concepts, is_on
from vlmpipe.importing.settings.deepspeed import translate_deepspeed
from vlmpipe.importing.settings.words import Tool, translate_words
from vlmpipe.importing.sources import Kind, Source, source_of
from vlmpipe.importing.translation import Translation
from vlmpipe.trainer.errors import ConfigError

TOOLS: dict[Kind, Tool] = {
    Kind.TRL: "trl",
    Kind.LLAMA_FACTORY: "llama_factory",
    Kind.AXOLOTL: "axolotl",
    Kind.ACCELERATE: "accelerate",
    Kind.TRANSFORMERS: "transformers",
}
# Kinds whose program is known by its settings alone.
OF_PROGRAMS = (Kind.TRL, Kind.LLAMA_FACTORY, Kind.AXOLOTL)
OF_ITS_IMAGE = "the program reads it from its own image"
OF_A_PROGRAM = {
    "train_batch_size": "train.global_batch_size",
    "optimizer.params.lr": "train.optimizer.learning_rate",
}
ENDINGS = (".yaml", ".yml", ".json", ".jsonc")

OF_ACCELERATE = (
    "torchrun starts the program, without accelerate's configuration: arguments of its Accelerator, or ACCELERATE_* "
    "variables in cluster.env, say it"
)


@dataclass(frozen=True)
class Opened:
    """A named file whose kind is known. `why_not` says why there is none."""

    source: Source | None
    why_not: str = ""


def open_settings(files: NamedFiles, name: str) -> Opened:
    """The settings in a named file."""
    try:
        return Opened(source_of(files.text(name), name))
    except NotOpenedError as error:
        return Opened(None, str(error))
    except ConfigError as error:
        return Opened(None, error.found)


def program_settings(files: NamedFiles, words: Sequence[str]) -> str:
    """The word that names a file with settings of TRL, LLaMA-Factory or Axolotl; empty for none."""
    for word in words:
        name = word.partition("=")[2] if word.startswith("-") and "=" in word else word
        if name.endswith(ENDINGS):
            source = open_settings(files, name).source
            if source and source.kind in OF_PROGRAMS:
                return name
    return ""


def add_values(translation: Translation, under: Path, content: object) -> None:
    """The values of a named file, to be answered below `under`."""
    translation.ledger.values |= {(*under, *path): value for path, value in leaves(content).items()}


def read_deepspeed_file(concepts: Concepts) -> None:
    """The values of DeepSpeed's configuration where the concept `deepspeed` names a file that can be opened."""
    named, translation = concepts.take("deepspeed"), concepts.translation
    if named is None or not isinstance(named.value, str) or not is_on(named.value):
        return
    opened = open_settings(translation.files, named.value)
    if opened.source is None or opened.source.kind is not Kind.DEEPSPEED:
        return
    del concepts.entries["deepspeed"]
    name, under = named.value, (named.value,)
    add_values(translation, under, opened.source.content)
    merge(concepts, translate_deepspeed(translation, under, is_whole=False))
    if "zero_stage" in concepts.entries:
        translation.change([named.path], "train.strategy", "", f"its values were read from {name}")
        del translation.settings["train.strategy"]  # which the stage says
    else:
        translation.change([named.path], "train.strategy", "ddp", f"{name} has no ZeRO stage: nothing is sharded")


def merge(concepts: Concepts, of_file: Concepts) -> None:
    """Add the concepts of a named file. What names the file comes first."""
    for concept, value in of_file.entries.items():
        if concept in concepts.entries and concepts.entries[concept].value is not None:
            concepts.translation.drop(value.path, f"{concepts.entries[concept]} comes first")
        elif value.value != "auto":
            concepts.entries[concept] = value


def read_program_settings(translation: Translation, name: str) -> Concepts | None:
    """The concepts of a file with a program's settings; None where it cannot be opened."""
    source = open_settings(translation.files, name).source
    if source is None or source.kind not in TOOLS or not isinstance(source.content, Mapping):
        return None
    add_values(translation, (name,), source.content)
    return translate_words(translation, TOOLS[source.kind], under=(name,))


def prefer(translation: Translation, command: Path, file: Path) -> None:
    """Note values of a file as dropped where the command sets the same field."""
    ledger = translation.ledger
    answered = (Outcome.EXPRESSED, Outcome.CHANGED)
    unanswered = set(ledger.unanswered())
    fields = {ledger.finding(leaf).field for leaf in ledger.below(command) if leaf not in unanswered}
    for leaf in ledger.below(file):
        if leaf not in unanswered and (finding := ledger.finding(leaf)).outcome in answered and finding.field in fields:
            translation.drop(leaf, "the command says another value, which comes first")


def leave_to_program(configuration: Concepts) -> None:
    """Answer accelerate's configuration for a program of one's own, which torchrun starts without it."""
    translation = configuration.translation
    for concept, setting in configuration.entries.items():
        if concept == "mixed_precision":
            before = translation.settings.get("cluster.env")
            variables = {**(before.value if before else {}), "ACCELERATE_MIXED_PRECISION": str(setting.value)}
            reason = "accelerate reads ACCELERATE_MIXED_PRECISION"
            translation.change([setting.path], "cluster.env", variables, reason)
        else:
            translation.refuse(setting.path, OF_ACCELERATE)
    if translation.settings.pop("train.clip_grad_norm", None):
        translation.ledger.refuse_field("train.clip_grad_norm", OF_ACCELERATE)


def read_files_of_program(translation: Translation, words: Sequence[str]) -> None:
    """Files of settings that a program of one's own is given: it reads them itself, from its image.

    Of a DeepSpeed configuration, batch and learning rate are what the run file says of the program.
    """
    for word in words:
        name = word.partition("=")[2] if word.startswith("-") and "=" in word else word
        if not name.endswith(ENDINGS) or name.startswith("-") or not translation.files.folders:
            continue
        opened, under = open_settings(translation.files, name), (name,)
        if translation.ledger.below(under):
            continue
        if opened.source is None or opened.source.kind is not Kind.DEEPSPEED:
            translation.ledger.add(under, name)
            why = opened.why_not or "its settings are those of the program"
            translation.drop(under, f"{why}; {OF_ITS_IMAGE}")
            continue
        add_values(translation, under, opened.source.content)
        for leaf in translation.ledger.below(under):
            field = OF_A_PROGRAM.get(".".join(map(str, leaf[1:])))
            value = translation.value(leaf)
            if field and isinstance(value, int | float) and not isinstance(value, bool):
                translation.express(leaf, field)
            else:
                translation.drop(leaf, OF_ITS_IMAGE)
