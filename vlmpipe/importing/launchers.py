"""Options of torchrun, deepspeed, accelerate and their like: processes, nodes, and accelerate's own configuration."""

from __future__ import annotations

import re

from vlmpipe.importing.cluster import EXAMPLE_GPUS
from vlmpipe.importing.findings import Outcome, Path
from vlmpipe.importing.launch_command import Launch
from vlmpipe.importing.named_settings import merge, open_settings, read_program_settings
from vlmpipe.importing.settings.concepts import Concepts
from vlmpipe.importing.settings.words import table_of
from vlmpipe.importing.sources import Kind
from vlmpipe.importing.translation import Setting, Translation

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


def translate_launcher(
    translation: Translation, launch: Launch, under: Path
) -> tuple[int | None, int | None, Concepts | None]:
    """Answer the launcher's options.

    Returns processes of a node and nodes, where they are said, and the concepts of accelerate's configuration.
    """
    per_node, nodes = _options(translation, launch, under)
    configuration = _configuration(translation, launch, under)
    if configuration:
        of_file, in_all = configuration.count("machines"), configuration.count("processes")
        known = translation.settings.get("cluster.replica_count")
        nodes = nodes or of_file
        machines = known.value if known else nodes or 1
        per_node = per_node or (max(1, in_all // machines) if in_all else None)
        for name, what in (("processes", "the GPUs of all machines"), ("machines", "the machines")):
            if setting := configuration.entries.pop(name, None):
                translation.drop(setting.path, f"{what}, which cluster names")
    return per_node or _visible_gpus(launch), nodes or _nodes_variable(launch), configuration


def _configuration(translation: Translation, launch: Launch, under: Path) -> Concepts | None:
    """Concepts of the configuration that accelerate is given by options, and in a file; None for other launchers."""
    if launch.launcher != "accelerate":
        return None
    place = (*under, launch.launcher)
    concepts = Concepts(translation)
    table = table_of("accelerate")
    for leaf in translation.ledger.below(place):
        name = str(leaf[-1])
        of_sections = (f"deepspeed_config.{name}", f"fsdp_config.{name}")
        keys = (name,) if name == "mixed_precision" else of_sections
        entry = next((table[key] for key in keys if key in table), None)
        if isinstance(entry, dict) and "is" in entry and len(leaf) > len(place):
            concepts.add(entry["is"], leaf, translation.value(leaf))
    leaf = (*place, "config_file")
    settings_file = translation.value(leaf)
    if not isinstance(settings_file, str):
        return concepts
    opened = open_settings(translation.files, settings_file)
    is_accelerates = opened.source is not None and opened.source.kind is Kind.ACCELERATE
    of_file = read_program_settings(translation, settings_file) if is_accelerates else None
    if of_file is None:
        why = opened.why_not or f"{settings_file} is {opened.source.kind.value if opened.source else 'nothing known'}"
        translation.refuse(leaf, f"accelerate's settings are in it: {why}")
        return concepts
    translation.ledger.note(leaf, Outcome.CHANGED, "train", f"its values were read from {settings_file}")
    merge(concepts, of_file)
    return concepts


def _options(translation: Translation, launch: Launch, under: Path) -> tuple[int | None, int | None]:
    """Processes of a node and nodes, where options say them."""
    place = (*under, launch.launcher)
    options = {str(leaf[-1]): leaf for leaf in translation.ledger.below(place) if len(leaf) > len(place)}
    nodes = next((_count(translation, leaf) for name, leaf in options.items() if name in NODES), None)
    nodes = nodes or next(
        (str(translation.value(options[name])).count(",") + 1 for name in HOSTS if name in options), None
    )
    known = translation.settings.get("cluster.replica_count")
    in_all = [_count(translation, leaf) or 0 for name, leaf in options.items() if name in IN_ALL]
    if not known and not nodes and launch.launcher != "torchrun" and max(in_all, default=0) > EXAMPLE_GPUS:
        nodes = -(-max(in_all) // EXAMPLE_GPUS)
    num_nodes = known.value if known else nodes or 1
    per_node: int | None = None
    for name, leaf in options.items():
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
        elif name in DROPPED:
            translation.drop(leaf, DROPPED[name] or "train.trainer.command has python -m")
        else:
            translation.refuse(leaf, f"{launch.launcher} starts no processes here, and the option is not known")
    for leaf in translation.ledger.below(place):
        if len(leaf) == len(place):
            translation.drop(leaf, "a process for each GPU is started, as train.trainer.launch says")
    return per_node, nodes


def _visible_gpus(launch: Launch) -> int | None:
    """GPUs of a node that the command may use, or processes that its variables start; None where nothing says them."""
    variables = dict(variable.partition("=")[::2] for variable in launch.variables)
    if (processes := variables.get("NPROC_PER_NODE", "")).isdigit() and 0 < int(processes) <= 100_000:
        return int(processes)
    included = re.fullmatch(r"[\w.-]+:([\d,]+)", dict(launch.options).get("include", ""))
    listed = included[1] if included else variables.get("CUDA_VISIBLE_DEVICES", "")
    return listed.count(",") + 1 if re.fullmatch(r"\d+(,\d+)*", listed) else None


def _nodes_variable(launch: Launch) -> int | None:
    text = dict(variable.partition("=")[::2] for variable in launch.variables).get("NNODES", "")
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
