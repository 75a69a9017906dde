"""The program of an imported command or job, as `train.trainer`, or its arguments as fields of `train`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlmpipe.importing.cluster import (
    assume_cluster,
    assume_strategy,
    assume_torch_build,
    processes_of_node,
    ranks,
)
from vlmpipe.importing.findings import Outcome, Path, is_secret
from vlmpipe.importing.launch_command import SELF_STARTING, Launch, arguments_of, is_words_of, method_of, parse_command
from vlmpipe.importing.launchers import translate_launcher
from vlmpipe.importing.named_files import NamedFiles, with_argument_files
from vlmpipe.importing.named_settings import (
    ENDINGS,
    leave_to_program,
    merge,
    open_settings,
    prefer,
    program_settings,
    read_deepspeed_file,
    read_files_of_program,
    read_program_settings,
)
from vlmpipe.importing.settings.concepts import Concepts
from vlmpipe.importing.settings.model_words import translate_model
from vlmpipe.importing.settings.models import family_of, model_fields
from vlmpipe.importing.settings.sharding import translate_sharding
from vlmpipe.importing.settings.training import EXAMPLE_RATE, translate_training
from vlmpipe.importing.settings.words import Tool, translate_words
from vlmpipe.importing.translation import Setting, Translation
from vlmpipe.job_spec.rules.environment import secret_in_word
from vlmpipe.trainer.printable import unsafe_characters

OUTPUT_OPTIONS = ("output_dir", "output-dir", "output", "save_dir", "save-dir", "model_dir", "output_path", "save")
CHECKPOINT_OPTIONS = ("checkpoint_dir", "checkpoint-dir", "ckpt_dir", "checkpoints")


EVALUATE_MACHINE = {
    "machine_type": "a2-highgpu-1g",
    "accelerator_type": "NVIDIA_TESLA_A100",
    "accelerator_count": 1,
    "boot_disk_size_gb": 200,
}
WITH_SUBCOMMANDS = ("trl", "llamafactory-cli", "axolotl")
OF_A_SEARCH = "trials are vlmpipe's trainer: a program of your own reports no trials to a search here"
SECRET = "a secret is not copied: name it in Secret Manager, in the run file's section secrets; the program reads it"
_BRACES = re.compile(r"\{([A-Za-z_]+)\}")


def command_content(
    words: Sequence[str], files: NamedFiles, *, takes_settings: bool = False
) -> tuple[Launch, dict[str, object]]:
    """A command in parts, as nested values with a name each: variables, options of the launcher, arguments.

    files: those that the command may name.
    takes_settings: the arguments of a program of one's own are settings of vlmpipe's trainer.
    """
    whole, argument_files = with_argument_files([word for word in words if word], files)
    launch = parse_command(whole)
    launch.argument_files, launch.settings_file = argument_files, program_settings(files, launch.program)
    content: dict[str, object] = {}
    if argument_files:
        content["files of arguments"] = {name: name[1:] for name in argument_files}
    if launch.variables:
        content["variables"] = dict(variable.partition("=")[::2] for variable in launch.variables)
    if launch.shell:
        content["shell variables"] = dict(launch.shell)
    if launch.launcher:
        options: dict[str, str] = {}
        for name, value in launch.options:
            while name in options:
                name += " (again)"
            options[name] = value
        content[launch.launcher] = options or "without options"
    secrets = _take_secrets(launch)
    if secrets:
        content["words not copied"] = secrets
    if launch.others:
        content["other commands"] = launch.others
    if launch.unused:
        content["words after the shell's text"] = launch.unused
    if launch.redirections:
        content["redirections"] = launch.redirections
    tool = is_words_of(launch)
    if launch.program and (tool or launch.program[0].startswith("-") or takes_settings or launch.settings_file):
        start = _num_words_of_program(launch.program)
        content["program"] = launch.program[:start]
        # A file of arguments that was not read is no value of the option before it.
        rest = [word for word in launch.program[start:] if word not in argument_files]
        if tool == "llama_factory":
            rest = [f"--{word}" if re.match(r"[A-Za-z_]\w*=", word) else word for word in rest]
        content["arguments"] = arguments_of(rest)
    elif launch.program:
        content["program"] = launch.program
    return launch, {name: value for name, value in content.items() if value not in ({}, [])}


def _num_words_of_program(words: Sequence[str]) -> int:
    """Words before the program's own arguments, such as python -u train.py, python -m module or trl sft."""
    if words[0].rpartition("/")[2] in WITH_SUBCOMMANDS:
        return min(2, len(words))
    if not re.fullmatch(r"(.*/)?python[\d.]*", words[0]):
        return 0 if words[0].startswith("-") else 1
    for index, word in enumerate(words[1:], 1):
        if word == "-m":
            return index + 2
        if not word.startswith("-"):
            return index + 1
    return len(words)


def has_own_program(words: Sequence[str]) -> bool:
    """Return whether a command runs a program of one's own, and not one whose settings are known."""
    launch = parse_command(words)
    return bool(launch.program) and not is_words_of(launch) and not launch.program[0].startswith("-")


def _take_secrets(launch: Launch) -> dict[str, str]:
    """Take secrets, and braces that a run file would fill in, out of the program's words."""
    secrets: dict[str, str] = {}
    public: list[str] = []
    for word in launch.program:
        previous = public[-1] if public else ""
        if secret_in_word(word, previous) or is_secret((), word):
            name = previous if previous.startswith("-") and "=" not in previous else word.partition("=")[0]
            if name == previous:
                public.pop()
            secrets[name.lstrip("-") if name != word else f"word {len(public) + 1}"] = word
        elif _BRACES.search(word) or unsafe_characters(word):
            secrets[f"word {len(public) + 1}"] = word
        else:
            public.append(word)
    launch.program = public
    return secrets


def translate_command(translation: Translation, launch: Launch, under: Path = ()) -> None:
    """Answer the values of a command below `under`, and set the fields of the program that it starts."""
    _variables(translation, (*under, "variables"))
    for leaf in translation.ledger.below((*under, "words not copied")):
        value = str(translation.value(leaf))
        if is_secret(leaf, value) or secret_in_word(value, f"--{leaf[-1]}"):
            translation.refuse(leaf, SECRET)
        elif unsafe_characters(value):
            translation.refuse(leaf, "a word with control characters is not copied")
        else:
            translation.refuse(leaf, "words in braces are filled in by a run file, from names that it knows")
    for leaf in translation.ledger.below((*under, "shell variables")):
        translation.drop(leaf, "its value is in the words that use it")
    for leaf in translation.ledger.below((*under, "files of arguments")):
        if why := launch.argument_files[str(leaf[-1])]:
            translation.refuse(leaf, why)
        else:
            translation.drop(leaf, "its words stand in its place")
    for leaf in translation.ledger.below((*under, "other commands")):
        translation.refuse(leaf, "a job runs one command; what is installed belongs into the image")
    for leaf in translation.ledger.below((*under, "words after the shell's text")):
        translation.refuse(leaf, 'the shell passes them to no program: its text has no "$@"')
    for leaf in translation.ledger.below((*under, "redirections")):
        translation.drop(leaf, "a job's output is in its log")
    per_node, nodes, configuration = translate_launcher(translation, launch, under)
    assume_cluster(translation, gpus=per_node * (nodes or 1) if per_node else None, nodes=nodes)
    arguments, program = (*under, "arguments"), (*under, "program")
    is_search = "tune.parameters" in translation.settings
    if translation.ledger.below(arguments) or is_search:
        for leaf in translation.ledger.below(program):
            if is_search:
                translation.refuse(leaf, OF_A_SEARCH)
            else:
                translation.drop(leaf, "vlmpipe's trainer does this; train.trainer.command runs the program itself")
        _known_arguments(translation, launch, under, configuration)
    elif translation.ledger.below(program):
        _own_program(translation, launch, program)
        if configuration:
            leave_to_program(configuration)
    else:
        assume_torch_build(translation)
        assume_strategy(translation, "an example: it fits most models")
        concepts = Concepts(translation)
        translate_training(concepts)
        translate_model(concepts)


def _known_arguments(translation: Translation, launch: Launch, place: Path, configuration: Concepts | None) -> None:
    tool, under = is_words_of(launch), (*place, "arguments")
    names: dict[str, Tool] = {"trl": "trl", "llama_factory": "llama_factory", "axolotl": "axolotl"}
    of_file = read_program_settings(translation, launch.settings_file) if launch.settings_file else None
    concepts = translate_words(translation, names.get(tool, "transformers"), under=under)
    if of_file:
        prefer(translation, under, (launch.settings_file,))
        merge(concepts, of_file)
        concepts.defaults, concepts.program, tool = of_file.defaults, of_file.program, tool or "a file"
    if configuration:
        merge(concepts, configuration)
    if (method := method_of(launch)) not in ("", "sft"):
        concepts.add("stage", (*place, "program"), method)
    if not tool:
        concepts.defaults = {"betas": [0.9, 0.999]}
        concepts.program = "AdamW in torch"
    assume_torch_build(translation)
    for leaf in translation.ledger.below(under):
        value = translation.value(leaf)
        if of_file and value == launch.settings_file:
            translation.ledger.note(leaf, Outcome.CHANGED, "train", f"its values were read from {value}")
        elif str(leaf[-1]).startswith(("word ", "config")) and str(value).endswith(ENDINGS):
            why = open_settings(translation.files, str(value)).why_not or "it has no settings of a known program"
            translation.refuse(leaf, f"settings are in it: {why}")
    read_deepspeed_file(concepts)
    translate_sharding(concepts)
    if not tool:
        assume_strategy(translation, "an example: no argument says a strategy, and this one fits most models")
    translate_training(concepts)
    translate_model(concepts)


def _variables(translation: Translation, under: Path) -> None:
    passed_on: dict[str, str] = {}
    for leaf in translation.ledger.below(under):
        name, value = str(leaf[-1]), str(translation.value(leaf))
        if is_secret(leaf, value, name):
            translation.refuse(leaf, SECRET)
        elif name == "CUDA_VISIBLE_DEVICES":
            translation.drop(leaf, "all GPUs of a machine are used")
        elif name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES"):
            translation.drop(leaf, "the launcher sets it for each process")
        elif "$" in value:
            translation.refuse(leaf, "no shell fills in a variable; cluster.env takes the value itself")
        else:
            passed_on[name] = value
            translation.ledger.note(leaf, Outcome.EXPRESSED, "cluster.env")
    if passed_on:
        before = translation.settings.get("cluster.env")
        variables = {**passed_on, **(before.value if before else {})}
        translation.settings["cluster.env"] = Setting(variables, before.reason if before else "", is_given=True)


def _own_program(translation: Translation, launch: Launch, leaf: Path) -> None:
    """A program of one's own: it runs as it is, in the place of vlmpipe's trainer."""
    words, reasons = list(launch.program), list[str]()
    head = words[0].rpartition("/")[2]
    if launch.is_module:
        words = ["python", "-m", *words]
    elif head.endswith(".py"):
        words = ["python", *words]
    elif head.endswith(".sh"):
        words = ["bash", *words]
    for index, word in enumerate(words):
        _replace_folder(words, index, word, reasons)
    if launch.launcher == "deepspeed":
        reasons.append("torchrun passes no --local_rank: the program reads LOCAL_RANK")
    if any("$" in word for word in words):
        reasons.append("no shell fills in $VARIABLES: the program reads them")
    translation.settings["train.trainer.name"] = Setting(_trainer_name(words), "", is_given=False)
    if reasons or words != launch.program:
        translation.change([leaf], "train.trainer.command", words, "; ".join(reasons) or "started for each GPU")
    else:
        translation.express(leaf, "train.trainer.command", words)
    _launch_field(translation, launch, head)
    named = _model_of(words)
    if family_of(named):
        for field, value in model_fields(named).items():
            translation.assume(field, value, f"{named} in the command" if field.endswith("weights") else "")
    read_files_of_program(translation, words)
    program_defaults(translation)


def program_defaults(translation: Translation) -> None:
    """Fields that every run file with a program of one's own has."""
    translation.assume("train.trainer.data_format", "none", "the program reads its own data; other forms write {data}")
    why = "a Hugging Face model in {output}; opaque and an evaluate_command for anything else"
    translation.assume("train.trainer.result", "hf-model", why)
    decided = "the program decides it by its own arguments; the run file needs a value"
    translation.assume("train.global_batch_size", ranks(translation), decided)
    translation.assume("train.optimizer.learning_rate", EXAMPLE_RATE, decided)
    why = "vlmpipe evaluates the model on one GPU; null takes the machine of training"
    for field, value in EVALUATE_MACHINE.items():
        translation.assume(f"cluster.evaluate_machine.{field}", value, why if field == "machine_type" else "")
    translate_model(Concepts(translation))


def _replace_folder(words: list[str], index: int, word: str, reasons: list[str]) -> None:
    """A folder for results becomes {output}, one for checkpoints {checkpoints}: where vlmpipe looks for them."""
    name, sign, value = word.partition("=")
    bare = name.lstrip("-")
    folder = "{output}" if bare in OUTPUT_OPTIONS else "{checkpoints}" if bare in CHECKPOINT_OPTIONS else ""
    if not folder or not name.startswith("-"):
        return
    if not sign and (index + 1 >= len(words) or words[index + 1].startswith("-")):
        return
    before = value if sign else words[index + 1]
    if sign:
        words[index] = f"{name}={folder}"
    else:
        words[index + 1] = folder
    reasons.append(f"{name} {before} there: {folder} is the folder whose content is kept")


def _launch_field(translation: Translation, launch: Launch, head: str) -> None:
    gpus = processes_of_node(translation)
    roles = any(field.startswith("train.trainer.roles.") for field in translation.settings)
    if head in SELF_STARTING:
        translation.assume("train.trainer.launch", "self", f"{head} starts its processes itself")
    elif roles:
        translation.assume("train.trainer.launch", "roles", "pool 2 holds parameter servers")
    elif launch.launcher in ("horovodrun", "mpirun", "mpiexec"):
        translation.assume("train.trainer.launch", "horovod", f"{launch.launcher} there")
    elif launch.launcher:
        translation.assume("train.trainer.launch", "torchrun", "")
    else:
        note = f"one process on {gpus} GPUs there; " if gpus > 1 else ""
        why = f"{note}torchrun starts one for each GPU, with RANK and WORLD_SIZE; self starts the program once a node"
        translation.assume("train.trainer.launch", "torchrun", why)


def _trainer_name(words: Sequence[str]) -> str:
    script = next((word for word in words if word.endswith((".py", ".sh"))), "")
    script = script or next((word for word in words if not word.startswith(("-", "python", "{"))), words[0])
    name = re.sub(r"[^a-z0-9]+", "-", script.rpartition("/")[2].rpartition(".")[0].lower() or script.lower()).strip("-")
    return name[:60] or "program"


def _model_of(words: Sequence[str]) -> str:
    """The model that a program is told by its arguments; empty for none."""
    arguments = arguments_of(words)
    names = ("model_name_or_path", "model_name", "model", "model_path", "model_id", "base_model", "pretrained_model")
    return next((str(arguments[name]) for name in names if isinstance(arguments.get(name), str)), "")
