"""Commands that start several processes: their programs, and their options for nodes, processes and addresses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Programs that start the processes of a node. Ours and those of Horovod and MPI find the GPUs or count over all nodes;
# DeepSpeed's and Accelerate's take all GPUs where nothing is said.
_TORCHRUN = re.compile(r"(^|/)torchrun$|torch\.distributed\.(run|launch)$")
_LAUNCHERS = re.compile(
    r"(^|/)(deepspeed|horovodrun|mpirun|mpiexec|srun|llamafactory-cli|swift|axolotl|ray)$|vlmpipe\.trainer\b"
    r"|accelerate(\.commands\.launch)?$|deepspeed\.launcher\.(runner|launch)$"
)
_DEEPSPEED = re.compile(r"(^|/)deepspeed$|deepspeed\.launcher\.runner$")
_ACCELERATE = re.compile(r"(^|/)accelerate$|accelerate\.commands\.launch$")
# Numbers of processes of launchers: program, option, and whether it counts those of all nodes.
_COUNTS = (
    (_DEEPSPEED, re.compile(r"--num_gpus"), False),
    (_ACCELERATE, re.compile(r"--num[-_]processes"), True),
    (re.compile(r"(^|/)(horovodrun|mpirun|mpiexec)$"), re.compile(r"-np?|--num-proc"), True),
)
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node")
_NODES = re.compile(r"--nnodes|--num_nodes|--num[-_]machines")
# Launchers that start processes on their own machine alone where no option says more: name, program, and what says it.
_ALONE = (
    ("torchrun", "--nnodes", _TORCHRUN, _NODES),
    ("accelerate", "--num_machines", _ACCELERATE, re.compile(r"--num[-_]machines|--config[-_]file")),
    ("deepspeed", "--hostfile", _DEEPSPEED, re.compile(r"-H|--hostfile")),
)
_RANK, _ADDRESS = re.compile(r"--(node|machine)[-_]rank"), re.compile(r"--master[-_]addr|--main[-_]process[-_]ip")
_PROGRAM = re.compile(r"\.py$|(^|/)python[0-9.]*$")  # what a launcher starts; options after it are the program's
_PART = re.compile(r"[^\s'\";&|()]+")
_QUOTED_VALUE = re.compile(r"=(['\"])([^'\"\s]*)\1")
_INSTALLED = re.compile(r"(python[0-9.]*\s+-m\s+)?\bpip[0-9.]*\s+install\b[^;&|\n]*")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_TAKES_A_WORD = re.compile(r"[-+][A-Za-z]*[oO]")  # of a shell's options: -o pipefail
_OPTIONS = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")  # a variable that may hold several words
_ALL_ARGUMENTS = re.compile(r"\$\{?[@*]")
_VARIABLE = re.compile(r"\$(\{[A-Z_][A-Z0-9_]*\}|[A-Z_][A-Z0-9_]*)")
PER_GPU = "a process for each GPU, where the program does not use several by itself"


@dataclass(frozen=True)
class Doubt:
    """Words that do not suit the nodes on which they are started."""

    found: str
    expected: str
    fix: str


def parts_of(words: Sequence[str]) -> list[str]:
    """The words in order, those of a shell's text too. Names of packages that it installs are left out."""
    texts = (_INSTALLED.sub(" ", _QUOTED_VALUE.sub(r"=\2", word)) for word in words)
    return [part for text in texts for part in _PART.findall(text)]


def is_torchrun(parts: Sequence[str]) -> bool:
    return any(_TORCHRUN.search(part) for part in parts)


def starts_processes(parts: Sequence[str]) -> bool:
    """Return whether a program among them starts a node's processes."""
    return is_torchrun(parts) or any(_LAUNCHERS.search(part) for part in parts)


def runs_shell(words: Sequence[str]) -> bool:
    """Return whether a shell with -c (or -lc and so on), which replaces variables, is among the words."""
    return _place_of_text(words) is not None


def passes_arguments(words: Sequence[str]) -> bool:
    """Return whether words that are appended to these reach the program.

    A shell's text has to pass them on, and takes the first word after it as its $0.
    """
    place = _place_of_text(words)
    if place is None:
        return True
    text = "".join(words[place : place + 1])
    return bool(_ALL_ARGUMENTS.search(text)) and (len(words) > place + 1 or "$0" in text)


def _place_of_text(words: Sequence[str]) -> int | None:
    """Place of a shell's text, after -c; None for none. Before the shell may be env, a timeout and the like.

    Words that begin with -c follow an image's entry point, which is a shell then.
    """
    start = next((number for number, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), -1)
    for number, word in enumerate(words[start + 1 :], start + 1):
        if re.fullmatch(r"-[a-z]*c", word):
            return number + 1
        if start < 0 or not (word.startswith(("-", "+")) or _TAKES_A_WORD.fullmatch(words[number - 1])):
            return None
    return None


def variable_in(word: str) -> str:
    """The first $VARIABLE of a word; empty for none."""
    match = _VARIABLE.search(word)
    return match[0] if match else ""


def process_doubts(parts: Sequence[str], *, nodes: int, per_node: int, unit: str = "GPUs") -> Iterator[Doubt]:
    """Fewer or more processes than `per_node` on each of `nodes`, where a launcher is told a number."""
    if is_torchrun(parts):
        count = _value(parts, _PROCESSES)
        if count in ("gpu", "auto", str(per_node)) or (count and not count.isdigit()):
            return
        start = next(number for number, part in enumerate(parts) if _TORCHRUN.search(part))
        if not count and (per_node == 1 or _in_a_variable(parts[start:])):
            return
        default = "" if count else ": torchrun starts one process"
        text = f"{count or 'no'} --nproc_per_node on {per_node} {unit}{default}"
        yield Doubt(text, PER_GPU, f"--nproc_per_node={per_node}")
    for program, option, of_all_nodes in _COUNTS:
        place = next((number for number, part in enumerate(parts) if program.search(part)), None)
        if place is None:
            continue
        options = list(itertools.takewhile(lambda part: not _PROGRAM.search(part), parts[place + 1 :]))
        count, expected = _value(options, option), per_node * (nodes if of_all_nodes else 1)
        if count.isdigit() and int(count) != expected:
            name = _name(options, option)
            text = f"{parts[place].rpartition('/')[2]} {name} {count} on {nodes} x {per_node} {unit}"
            yield Doubt(text, PER_GPU, f"{name} {expected}, or leave it out")


def takes_options_from(names: Iterable[str]) -> bool:
    """Return whether variables of these names hold options of torchrun, such as PET_NNODES."""
    return any(name.startswith("PET_") for name in names)


def node_doubts(parts: Sequence[str], *, nodes: int, place: int | None = None) -> Iterator[Doubt]:
    """Numbers for a launcher that are the same on all nodes, or not those of the job.

    Args:
        place: the node's place in the job, from 0, where no other node is told these words.
    """
    count = _value(parts, _NODES)
    for launcher, name, program, option in _ALONE if nodes > 1 else ():
        before = ["", *parts]  # --strategy deepspeed is an option's value
        places = (number for number, part in enumerate(parts) if program.search(part))
        start = next((number for number in places if not before[number].startswith("--")), None)
        if start is not None and not _value(parts, option) and not _in_a_variable(parts[start:]):
            expected = f"all {nodes}: {launcher} starts one where nothing is said, and each node would train by itself"
            fix = f"torchrun with --nnodes={nodes}, and --node_rank and --master_addr from CLUSTER_SPEC"
            yield Doubt(f"no {name} on {nodes} nodes", expected, fix)
    if count.isdigit() and int(count) != nodes:
        name = _name(parts, _NODES)
        yield Doubt(f"{name} {count}", f"{nodes}, the replicas of pools 0 and 1", f"{name}={nodes}")
    rank = _value(parts, _RANK)
    if rank.isdigit() and nodes > 1 and int(rank) != place:
        expected = "a rank of each node's own: these words are the same in all replicas of a pool"
        fix = "take it from CLUSTER_SPEC in the program that starts torchrun, as python -m vlmpipe.trainer.launch does"
        yield Doubt(f"{_name(parts, _RANK)} {rank}", expected, fix)
    address = _value(parts, _ADDRESS)
    if address and not address.startswith("$") and nodes > 1:
        expected = "the chief's address, which is known when the job runs"
        fix = "take it from CLUSTER_SPEC, or from MASTER_ADDR in a shell"
        yield Doubt(f"{_name(parts, _ADDRESS)} {address}", expected, fix)


def program_of(parts: Sequence[str]) -> str:
    """`python train.py`, where the command starts so; a shell before it does not count."""
    for number, word in enumerate(parts):
        if re.fullmatch(r"(.*/)?python[0-9.]*", word):
            rest = [part for part in parts[number + 1 :] if part == "-m" or not part.startswith("-")]
            return " ".join([word.rpartition("/")[2], *rest[: 2 if rest[:1] == ["-m"] else 1]])
    return ""


def _in_a_variable(parts: Sequence[str]) -> bool:
    """Return whether options of a launcher, the first part, stand in a variable: torchrun $ARGS train.py."""
    options = itertools.takewhile(lambda pair: not _PROGRAM.search(pair[1]), itertools.pairwise(parts))
    return any(_OPTIONS.fullmatch(word) and not re.fullmatch(r"--[\w-]+", before) for before, word in options)


def _name(parts: Sequence[str], option: re.Pattern[str]) -> str:
    return next((name for part in parts if option.fullmatch(name := part.partition("=")[0])), "")


def _value(parts: Sequence[str], option: re.Pattern[str]) -> str:
    """Value of an option, as the next word or after =; empty where it is not given."""
    for number, word in enumerate(parts):
        name, sign, value = word.partition("=")
        if option.fullmatch(name):
            return value if sign else (parts[number + 1] if number + 1 < len(parts) else "")
    return ""
