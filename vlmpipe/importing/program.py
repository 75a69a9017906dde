"""The program of an imported command or job, as `train.trainer`, or its arguments as fields of `train`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlmpipe.importing.cluster import (
    EXAMPLE_GPUS,
    assume_cluster,
    assume_strategy,
    assume_torch_build,
    processes_of_node,
    ranks,
)
from vlmpipe.importing.findings import Outcome, Path, is_secret
from vlmpipe.importing.launch_command import SELF_STARTING, Launch, arguments_of, is_words_of, method_of, parse_command
from vlmpipe.importing.settings.concepts import Concepts
from vlmpipe.importing.settings.model_words import translate_model
from vlmpipe.importing.settings.models import family_of, model_fields
from vlmpipe.importing.settings.sharding import translate_sharding
from vlmpipe.importing.settings.training import EXAMPLE_RATE, translate_training
from vlmpipe.importing.settings.words import Tool, translate_words
from vlmpipe.importing.translation import Setting, Translation
from vlmpipe.job_spec.rules.environment import secret_in_word
from vlmpipe.trainer.printable import unsafe_characters

# Options that say processes of a node, processes of all nodes, and nodes.
PER_NODE = ("nproc_per_node", "num_gpus")
IN_ALL = ("num_processes", "np", "n", "num-proc")
HOSTS = ("H", "host", "hosts")
NODES = ("nnodes", "num_nodes", "num_machines")
DROPPED = {
    "node_rank": "the launcher finds each node's rank from CLUSTER_SPEC",
    "machine_rank": "the launcher finds each node's rank from CLUSTER_SPEC",
    "master_addr": "the launcher finds the chief's address from CLUSTER_SPEC",
    "master_port": "the launcher finds the chief's port from CLUSTER_SPEC",
    "main_process_ip": "the launcher finds the chief's address from CLUSTER_SPEC",
    "main_process_port": "the launcher finds the chief's port from CLUSTER_SPEC",
    "rdzv_backend": "the launcher joins the nodes",
    "rdzv_endpoint": "the launcher joins the nodes",
    "rdzv_id": "the launcher joins the nodes",
    "rdzv_conf": "the launcher joins the nodes",
    "standalone": "the launcher joins the nodes",
    "hostfile": "the launcher finds the nodes from CLUSTER_SPEC",
    "H": "the launcher finds the nodes from CLUSTER_SPEC",
    "hosts": "the launcher finds the nodes from CLUSTER_SPEC",
    "include": "all GPUs of a machine are used",
    "exclude": "all GPUs of a machine are used",
    "launcher": "the launcher finds the nodes from CLUSTER_SPEC",
    "no_local_rank": "LOCAL_RANK is always set",
    "use_env": "LOCAL_RANK is always set",
    "multi_gpu": "all GPUs of a machine are used",
    "gpu_ids": "all GPUs of a machine are used",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS in cluster.env sets it",
    "use_deepspeed": "the program's own settings decide its strategy",
    "use_fsdp": "the program's own settings decide its strategy",
    "dynamo_backend": "the program's own settings decide it",
    "mixed_precision": "the program's own settings decide it",
    "m": "",
    "module": "",
}
RESTARTS = (
    "cluster.restart_job_on_worker_restart restarts all nodes from a checkpoint: ranks cannot rejoin a running job"
)
OUTPUT_OPTIONS = ("output_dir", "output-dir", "output", "save_dir", "save-dir", "model_dir", "output_path", "save")
CHECKPOINT_OPTIONS = ("checkpoint_dir", "checkpoint-dir", "ckpt_dir", "checkpoints")


EVALUATE_MACHINE = {
    "machine_type": "a2-highgpu-1g",
    "accelerator_type": "NVIDIA_TESLA_A100",
    "accelerator_count": 1,
    "boot_disk_size_gb": 200,
}
OF_A_SEARCH = "trials are vlmpipe's trainer: a program of your own reports no trials to a search here"
SECRET = "a secret is not copied: name it in Secret Manager, in the run file's section secrets; the program reads it"
_BRACES = re.compile(r"\{([A-Za-z_]+)\}")


def command_content(words: Sequence[str], *, takes_settings: bool = False) -> tuple[Launch, dict[str, Any]]:
    """A command in parts, as nested values with a name each: variables, options of the launcher, arguments.

    takes_settings: the arguments of a program of one's own are settings of vlmpipe's trainer.
    """
    launch = parse_command([word for word in words if word])
    content: dict[str, Any] = {}
    if launch.variables:
        content["variables"] = dict(each.partition("=")[::2] for each in launch.variables)
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
        content["words behind the shell's text"] = launch.unused
    if launch.redirections:
        content["redirections"] = launch.redirections
    tool = is_words_of(launch)
    if tool:
        start = 2 if launch.program[0].startswith("python") or tool != "trl" or launch.program[0] == "trl" else 1
        start = min(start, len(launch.program))
        content["program"] = launch.program[:start]
        content["arguments"] = arguments_of(launch.program[start:])
    elif launch.program and (launch.program[0].startswith("-") or takes_settings):
        start = _num_words_of_program(launch.program)
        content["program"] = launch.program[:start]
        content["arguments"] = arguments_of(launch.program[start:])
    elif launch.program:
        content["program"] = launch.program
    return launch, {name: value for name, value in content.items() if value not in ({}, [])}


def _num_words_of_program(words: Sequence[str]) -> int:
    """Words before the program's own arguments, such as python -u train.py or python -m module."""
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
    found: dict[str, str] = {}
    kept: list[str] = []
    for word in launch.program:
        previous = kept[-1] if kept else ""
        if secret_in_word(word, previous) or is_secret((), word):
            name = previous if previous.startswith("-") and "=" not in previous else word.partition("=")[0]
            if name == previous:
                kept.pop()
            found[name.lstrip("-") if name != word else f"word {len(kept) + 1}"] = word
        elif _BRACES.search(word) or unsafe_characters(word):
            found[f"word {len(kept) + 1}"] = word
        else:
            kept.append(word)
    launch.program = kept
    return found


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
    for leaf in translation.ledger.below((*under, "other commands")):
        translation.refuse(leaf, "a job runs one command; what is installed belongs into the image")
    for leaf in translation.ledger.below((*under, "words behind the shell's text")):
        translation.refuse(leaf, 'the shell passes them to no program: its text has no "$@"')
    for leaf in translation.ledger.below((*under, "redirections")):
        translation.drop(leaf, "a job's output is in its log")
    per_node, nodes = _launcher(translation, launch, under)
    per_node, nodes = per_node or _visible_gpus(launch), nodes or _nodes_variable(launch)
    assume_cluster(translation, gpus=per_node * (nodes or 1) if per_node else None, nodes=nodes)
    arguments, program = (*under, "arguments"), (*under, "program")
    is_search = "tune.parameters" in translation.settings
    if translation.ledger.below(arguments) or is_search:
        for leaf in translation.ledger.below(program):
            if is_search:
                translation.refuse(leaf, OF_A_SEARCH)
            else:
                translation.drop(leaf, "vlmpipe's trainer does this; train.trainer.command runs the program itself")
        _known_arguments(translation, launch, under)
    elif translation.ledger.below(program):
        _own_program(translation, launch, program)
    else:
        assume_torch_build(translation)
        assume_strategy(translation, "an example: it fits most models")
        concepts = Concepts(translation)
        translate_training(concepts)
        translate_model(concepts)


def _known_arguments(translation: Translation, launch: Launch, place: Path) -> None:
    tool, under = is_words_of(launch), (*place, "arguments")
    names: dict[str, Tool] = {"trl": "trl", "llama_factory": "llama_factory"}
    concepts = translate_words(translation, names.get(tool, "transformers"), under=under)
    if (method := method_of(launch)) not in ("", "sft"):
        concepts.add("stage", (*place, "program"), method)
    if not tool:
        concepts.defaults = {"betas": [0.9, 0.999]}
        concepts.program = "AdamW in torch"
    assume_torch_build(translation)
    for leaf in translation.ledger.below(under):
        word = str(leaf[-1])
        if word.startswith("word ") and str(translation.value(leaf)).endswith((".yaml", ".yml", ".json")):
            translation.refuse(leaf, "the settings are in that file: vlmpipe import takes it")
    translate_sharding(concepts)
    if not tool:
        assume_strategy(translation, "an example: no argument says a strategy, and this one fits most models")
    translate_training(concepts)
    translate_model(concepts)


def _variables(translation: Translation, under: Path) -> None:
    kept: dict[str, str] = {}
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
            kept[name] = value
            translation.ledger.note(leaf, Outcome.EXPRESSED, "cluster.env")
    if kept:
        before = translation.settings.get("cluster.env")
        variables = {**kept, **(before.value if before else {})}
        translation.settings["cluster.env"] = Setting(variables, before.reason if before else "", is_given=True)


def _launcher(translation: Translation, launch: Launch, under: Path) -> tuple[int | None, int | None]:
    """Answer the launcher's options. Returns processes of a node and nodes, where they are said."""
    place = (*under, launch.launcher)
    said = {str(leaf[-1]): leaf for leaf in translation.ledger.below(place) if len(leaf) > len(place)}
    nodes = next((_count(translation, leaf) for name, leaf in said.items() if name in NODES), None)
    nodes = nodes or next((str(translation.value(said[name])).count(",") + 1 for name in HOSTS if name in said), None)
    known = translation.settings.get("cluster.replica_count")
    in_all = [_count(translation, leaf) or 0 for name, leaf in said.items() if name in IN_ALL]
    if not known and not nodes and launch.launcher != "torchrun" and max(in_all, default=0) > EXAMPLE_GPUS:
        nodes = -(-max(in_all) // EXAMPLE_GPUS)
    num_nodes = known.value if known else nodes or 1
    per_node: int | None = None
    for name, leaf in said.items():
        value = translation.value(leaf)
        count = _count(translation, leaf)
        if name in NODES:
            _nodes_option(translation, leaf, count, known)
        elif name in (*PER_NODE, *(IN_ALL if launch.launcher != "torchrun" else ())):
            if count is None:
                translation.drop(leaf, "a process for each GPU, as here")
                continue
            per_node = count if name in PER_NODE else max(1, count // num_nodes)
            _processes_option(translation, leaf, per_node)
        elif name == "max_restarts":
            translation.drop(leaf, RESTARTS)
        elif name == "mixed_precision" and launch.launcher == "accelerate":
            variables = dict(translation.settings["cluster.env"].value) if "cluster.env" in translation.settings else {}
            variables["ACCELERATE_MIXED_PRECISION"] = str(value)
            translation.change([leaf], "cluster.env", variables, "accelerate reads ACCELERATE_MIXED_PRECISION")
        elif name in DROPPED:
            translation.drop(leaf, DROPPED[name] or "train.trainer.command has python -m")
        elif name in ("config_file", "deepspeed_config_file"):
            translation.refuse(leaf, f"the settings are in {value}: vlmpipe import takes it")
        else:
            translation.refuse(leaf, f"{launch.launcher} starts no processes here, and the option is not known")
    for leaf in translation.ledger.below(place):
        if len(leaf) == len(place):
            translation.drop(leaf, "a process for each GPU is started, as train.trainer.launch says")
    return per_node, nodes


def _visible_gpus(launch: Launch) -> int | None:
    """GPUs of a node that the command may use, or processes that its variables start; None where nothing says them."""
    variables = dict(each.partition("=")[::2] for each in launch.variables)
    if (processes := variables.get("NPROC_PER_NODE", "")).isdigit() and 0 < int(processes) <= 100_000:
        return int(processes)
    included = re.fullmatch(r"[\w.-]+:([\d,]+)", dict(launch.options).get("include", ""))
    listed = included[1] if included else variables.get("CUDA_VISIBLE_DEVICES", "")
    return listed.count(",") + 1 if re.fullmatch(r"\d+(,\d+)*", listed) else None


def _nodes_variable(launch: Launch) -> int | None:
    text = dict(each.partition("=")[::2] for each in launch.variables).get("NNODES", "")
    return int(text) if text.isdigit() and 0 < int(text) <= 100_000 else None


def _nodes_option(translation: Translation, leaf: Path, count: int | None, known: Setting | None) -> None:
    value = translation.value(leaf)
    if count is None:
        translation.drop(leaf, "the nodes are those of cluster.replica_count")
    elif known is not None and known.value != count:
        translation.drop(leaf, f"the job has {known.value} nodes, which counts")
    elif ":" in str(value):
        reason = f"{value} there: a run keeps its number of nodes, and resumes on another one"
        translation.change([leaf], "cluster.replica_count", count, reason)
    else:
        translation.express(leaf, "cluster.replica_count", count)


def _processes_option(translation: Translation, leaf: Path, per_node: int) -> None:
    gpus = translation.settings.get("cluster.accelerator_count")
    if gpus is None or gpus.value == per_node:
        translation.express(leaf, "cluster.processes_per_replica", per_node)
    elif gpus.value == 0 or per_node < gpus.value:
        reason = (
            f"as there, though a node has {gpus.value} GPUs: {gpus.value - per_node} are idle" if gpus.value else ""
        )
        translation.change([leaf], "cluster.processes_per_replica", per_node, reason or "processes on CPUs")
    else:
        translation.drop(leaf, f"a node has {gpus.value} GPUs, and gets a process for each")


def _count(translation: Translation, leaf: Path) -> int | None:
    """A number of an option; of a range such as 1:4 the larger one."""
    text = str(translation.value(leaf)).rpartition(":")[2]
    return int(text) if text.isdigit() and 0 < int(text) <= 100_000 else None


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
        one = f"one process on {gpus} GPUs there; " if gpus > 1 else ""
        why = f"{one}torchrun starts one for each GPU, with RANK and WORLD_SIZE; self starts the program once a node"
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
