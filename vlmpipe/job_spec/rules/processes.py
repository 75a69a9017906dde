"""Rules VP216 to VP218: what starts a process for each GPU, and what launchers are told about the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlmpipe.config.launch_commands import (
    PER_GPU,
    node_doubts,
    parts_of,
    process_doubts,
    program_of,
    starts_processes,
    takes_options_from,
)
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, WORKER_POOL


def check(job: Job) -> Iterator[Violation]:
    """Each pool of nodes with several GPUs, the words for a launcher of each, and workers without the chief's."""
    yield from _lacking(job)
    for pool in job.pools:
        if not pool.is_node or pool.is_tpu or takes_options_from(name for _, name, _ in pool.environment()):
            continue
        path, parts = _command(pool)
        if module := pool.package.get("python_module"):
            parts = ["python", "-m", module, *parts]
        if pool.accelerator_count > 1:
            yield from _processes(pool, job.num_nodes, path, parts)
        if starts_processes(parts):
            place = pool.index if pool.replica_count == 1 else None  # pool 1's only replica is the node after the chief
            for doubt in node_doubts(parts, nodes=job.num_nodes, place=place):
                yield Violation("VP217", path, doubt.found, doubt.expected, doubt.fix)


def _lacking(job: Job) -> Iterator[Violation]:
    """Workers of the chief's image without any of the chief's words."""
    if len(job.pools) <= WORKER_POOL:
        return
    chief, workers = job.pools[CHIEF_POOL], job.pools[WORKER_POOL]
    words = [word for _, word in chief.words()]
    if words and chief.image_uri and chief.image_uri == workers.image_uri and not list(workers.words()):
        fix = "write the same in both pools: nothing is taken over from pool 0"
        actual = f"no command and no arguments, where the chief has {len(words)} words"
        yield Violation("VP218", workers.at("container_spec"), actual, "what the chief of the same image is told", fix)


def _command(pool: Pool) -> tuple[FieldPath, list[str]]:
    """The words of command and arguments in order, those of a shell's text too, and where the first of them stands."""
    words = [(path, part) for path, word in pool.words() for part in parts_of([word])]
    return (words[0][0][:-1] if words else pool.at()), [part for _, part in words]


def _processes(pool: Pool, nodes: int, path: FieldPath, parts: Sequence[str]) -> Iterator[Violation]:
    gpus = pool.accelerator_count
    if starts_processes(parts):
        for doubt in process_doubts(parts, nodes=nodes, per_node=gpus):
            yield Violation("VP216", path, doubt.found, doubt.expected, doubt.fix)
    elif program := program_of(parts):
        fix = f"torchrun --nproc_per_node={gpus} PROGRAM; nothing, if it uses all GPUs (tf.distribute, mp.spawn)"
        yield Violation("VP216", path, f"one process ({program}) on {gpus} GPUs", PER_GPU, fix)
    elif not pool.container.get("command"):  # of a script of one's own nothing is known
        actual = f"no command on {gpus} GPUs: the image's entry point starts the processes, or starts one"
        fix = 'look at the ENTRYPOINT of the image; ENTRYPOINT ["python", ...] leaves GPUs idle that are paid for'
        yield Violation("VP216", path, actual, PER_GPU, fix)
