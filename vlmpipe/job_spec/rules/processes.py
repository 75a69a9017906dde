"""Rules VP216 and VP217: what starts a process for each GPU, and what torchrun is told about the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation

# Programs that start the processes of a node, and their options that say how many. Ours and those of Horovod and MPI
# find the GPUs or count over all nodes; DeepSpeed's and Accelerate's take all GPUs where nothing is said.
_TORCHRUN = re.compile(r"(^|/)torchrun$|torch\.distributed\.(run|launch)$")
_LAUNCHERS = re.compile(
    r"(^|/)(deepspeed|horovodrun|mpirun|mpiexec|srun|llamafactory-cli|swift|axolotl|ray)$|vlmpipe\.trainer\b"
    r"|accelerate(\.commands\.launch)?$|deepspeed\.launcher\.(runner|launch)$"
)
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node")
_NODES, _NODE_RANK = re.compile(r"--nnodes"), re.compile(r"--node[-_]rank")
_ADDRESS = re.compile(r"--master[-_]addr")
_WORD = re.compile(r"[^\s'\";&|()]+")
PER_GPU = "a process for each GPU, where the program does not use several by itself"


def check(job: Job) -> Iterator[Violation]:
    """Each pool of nodes with several GPUs, and the words for torchrun of each."""
    for pool in job.pools:
        if not pool.is_node or pool.is_tpu:
            continue
        path, words = _command(pool)
        if module := pool.get("python_package_spec", "python_module"):
            words = ["python", "-m", module, *words]
        is_torchrun = any(_TORCHRUN.search(word) for word in words)
        if pool.accelerator_count > 1:
            yield from _processes(pool, path, words, is_torchrun=is_torchrun)
        if is_torchrun:
            yield from _nodes(job, path, words)


def _command(pool: Pool) -> tuple[FieldPath, list[str]]:
    """The words of command and arguments in order, those of a shell's text too, and where the first of them stands."""
    found = [(path, part) for path, word in pool.words() for part in _WORD.findall(word)]
    return (found[0][0][:-1] if found else pool.at()), [part for _, part in found]


def _processes(pool: Pool, path: FieldPath, words: Sequence[str], *, is_torchrun: bool) -> Iterator[Violation]:
    gpus = pool.accelerator_count
    if is_torchrun:
        given = _value(words, _PROCESSES)
        if given in ("gpu", "auto", str(gpus)) or (given and not given.isdigit()):
            return
        found = f"{given or 'no'} --nproc_per_node on {gpus} GPUs" + ("" if given else ": torchrun starts one process")
        yield Violation("VP216", path, found, PER_GPU, f"--nproc_per_node={gpus}")
    elif any(_LAUNCHERS.search(word) for word in words):
        return
    elif program := _program(words):
        fix = f"torchrun --nproc_per_node={gpus} PROGRAM; nothing, if it uses all GPUs (tf.distribute, mp.spawn)"
        yield Violation("VP216", path, f"one process ({program}) on {gpus} GPUs", PER_GPU, fix)
    elif not pool.get("container_spec", "command"):  # of a script of one's own nothing is known
        found = f"no command on {gpus} GPUs: the image's entry point starts the processes, or starts one"
        fix = 'look at the ENTRYPOINT of the image; ENTRYPOINT ["python", ...] leaves GPUs idle that are paid for'
        yield Violation("VP216", path, found, PER_GPU, fix)


def _program(words: Sequence[str]) -> str:
    """`python train.py`, where the command starts so; a shell before it does not count."""
    for number, word in enumerate(words):
        if re.fullmatch(r"(.*/)?python[0-9.]*", word):
            rest = [each for each in words[number + 1 :] if each == "-m" or not each.startswith("-")]
            return " ".join([word.rpartition("/")[2], *rest[: 2 if rest[:1] == ["-m"] else 1]])
    return ""


def _nodes(job: Job, path: FieldPath, words: Sequence[str]) -> Iterator[Violation]:
    """Numbers for torchrun that are the same in all replicas, or not the job's."""
    nodes = job.num_nodes
    given = _value(words, _NODES)
    if given.isdigit() and int(given) != nodes:
        yield Violation(
            "VP217", path, f"--nnodes {given}", f"{nodes}, the replicas of pools 0 and 1", f"--nnodes={nodes}"
        )
    rank = _value(words, _NODE_RANK)
    if rank.isdigit() and nodes > 1:
        expected = "a rank of each node's own: these words are the same in all replicas of a pool"
        fix = "take it from CLUSTER_SPEC in the program that starts torchrun, as python -m vlmpipe.trainer.launch does"
        yield Violation("VP217", path, f"--node_rank {rank}", expected, fix)
    address = _value(words, _ADDRESS)
    if address and not address.startswith("$") and nodes > 1:
        expected = "the chief's address, which is known when the job runs"
        fix = "take it from CLUSTER_SPEC, or from MASTER_ADDR in a shell"
        yield Violation("VP217", path, f"--master_addr {address}", expected, fix)


def _value(words: Sequence[str], option: re.Pattern[str]) -> str:
    """Value of an option, as the next word or behind =; empty where it is not given."""
    for number, word in enumerate(words):
        name, sign, value = word.partition("=")
        if option.fullmatch(name):
            return value if sign else (words[number + 1] if number + 1 < len(words) else "")
    return ""
