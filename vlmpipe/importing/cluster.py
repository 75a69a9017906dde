"""The machines of an imported run: how many ranks there are, and an example where nothing is said."""

from __future__ import annotations

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.sections.cluster import ClusterConfig
from vlmpipe.importing.translation import Setting, Translation
from vlmpipe.trainer.distributed.cuda_builds import cuda_builds

EXAMPLE_GPU, EXAMPLE_GPUS = "NVIDIA_A100_80GB", 8
EXAMPLE_DISK_GB = 500
BF16_CAPABILITY = 8.0  # compute capability of the first GPUs with bf16 products, A100


def ranks(translation: Translation) -> int:
    """Data-parallel ranks of the run file so far."""
    nodes, processes = _number(translation, "cluster.replica_count", 1), processes_of_node(translation)
    degrees = 1
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        degrees *= _number(translation, f"train.{name}", 1)
    return max(1, nodes * processes // degrees)


def gpus(translation: Translation) -> int:
    """GPUs of all nodes."""
    return _number(translation, "cluster.replica_count", 1) * _number(translation, "cluster.accelerator_count", 1)


def gpu_memory_gib(translation: Translation) -> float:
    """Memory of all GPUs; infinite where the GPU is not known."""
    setting = translation.settings.get("cluster.accelerator_type")
    gpu = load_catalog().gpus.get(str(setting.value)) if setting else None
    return gpu.memory_gib * gpus(translation) if gpu else float("inf")


def processes_of_node(translation: Translation) -> int:
    """Ranks of one node."""
    return _number(translation, "cluster.processes_per_replica", 0) or _number(
        translation, "cluster.accelerator_count", 1
    )


def gpu_takes_bf16(translation: Translation) -> bool:
    """Return whether the GPU has bf16 products; true where it is not known."""
    setting = translation.settings.get("cluster.accelerator_type")
    gpu = load_catalog().gpus.get(str(setting.value)) if setting else None
    return gpu is None or gpu.compute_capability >= BF16_CAPABILITY


def assume_cluster(translation: Translation, *, gpus: int | None = None, nodes: int | None = None) -> None:
    """Machines for a number of GPUs, in all (`gpus`) or of one node and `nodes` of them; 8 where nothing is known."""
    if "cluster.machine_type" not in translation.settings:
        _example_machines(translation, gpus, nodes)
    why = "not in the file: weights, a checkpoint and shards of the data lie on it"
    translation.assume("cluster.boot_disk_size_gb", EXAMPLE_DISK_GB, why)
    if _number(translation, "cluster.replica_count", 1) > 1:
        why = "a node that is restarted alone cannot rejoin the others"
        translation.assume("cluster.restart_job_on_worker_restart", True, why)


def _example_machines(translation: Translation, gpus: int | None, nodes: int | None) -> None:
    is_named = gpus is not None or nodes is not None
    total = gpus or EXAMPLE_GPUS * (nodes or 1)
    count = nodes or max(1, -(-total // EXAMPLE_GPUS))
    per_node = max(1, total // count)
    sizes = [
        size for machine in load_catalog().machines_with(EXAMPLE_GPU) for size in machine.accelerators[EXAMPLE_GPU]
    ]
    size = min((size for size in sizes if size >= per_node), default=max(sizes))
    machine = next(m for m in load_catalog().machines_with(EXAMPLE_GPU) if size in m.accelerators[EXAMPLE_GPU])
    why = "the file does not name a machine: an example; vlmpipe plan --suggest cheapest compares others"
    translation.assume("cluster.replica_count", count, "" if is_named else "not in the file: an example")
    translation.assume("cluster.machine_type", machine.machine_type, why)
    translation.assume("cluster.accelerator_type", EXAMPLE_GPU, "")
    translation.assume(
        "cluster.accelerator_count", size, "" if is_named else f"not in the file: {size} GPUs are assumed"
    )
    if size != per_node:
        translation.assume("cluster.processes_per_replica", per_node, f"no machine has {per_node} of these GPUs")


def assume_torch_build(translation: Translation) -> None:
    """The build of vlmpipe's trainer image for the GPUs, where it is not the default one."""
    setting = translation.settings.get("cluster.accelerator_type")
    gpu = load_catalog().gpus.get(str(setting.value)) if setting else None
    default = cuda_builds()[str(ClusterConfig.model_fields["torch_build"].default)]
    if gpu is None or default.has_code_for(gpu.compute_capability):
        return
    able = [build for build in cuda_builds().values() if build.has_code_for(gpu.compute_capability)]
    if able:
        why = f"the default build has no code for {gpu.accelerator_type}: make build TORCH_BUILD={able[-1].name}"
        translation.assume("cluster.torch_build", able[-1].name, why)


def assume_strategy(translation: Translation, why: str) -> None:
    """A strategy that fits most models, where nothing says one: hsdp where reducers sum gradients, else fsdp."""
    has_reducers = "cluster.reduction_server.replica_count" in translation.settings
    translation.assume("train.strategy", "hsdp" if has_reducers else "fsdp", why)


def mend_batch(translation: Translation) -> None:
    """Raise the global batch to the next multiple of the micro-batch on all data-parallel ranks."""
    of = _number(translation, "train.micro_batch_size", 1) * ranks(translation)
    setting = translation.settings["train.global_batch_size"]
    if isinstance(setting.value, int) and setting.value % of:
        whole = -(-setting.value // of) * of
        reason = "; ".join(filter(None, (setting.reason, f"{whole} is the next multiple of {of}")))
        translation.settings["train.global_batch_size"] = Setting(whole, reason, setting.is_given)


def assume_no_torch_build(translation: Translation) -> None:
    """Check no GPU against the build of torch in an image of the user's."""
    translation.assume("cluster.torch_build", "", "the build of torch in this image is not known here")


def _number(translation: Translation, field: str, default: int) -> int:
    setting = translation.settings.get(field)
    return setting.value if setting and isinstance(setting.value, int) else default
