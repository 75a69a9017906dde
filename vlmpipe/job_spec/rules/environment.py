"""Rules VP704 to VP706: environment variables and arguments that do not reach a container as written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.violation import Violation

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_VARIABLE = re.compile(r"\$(\{[A-Z_][A-Z0-9_]*\}|[A-Z_][A-Z0-9_]*)")
_PLACEHOLDER = re.compile(r"\{\{\$[^}]*\}\}|\{\{channel:[^}]*\}\}")
_OF_A_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def check(job: Job) -> Iterator[Violation]:
    """Shell variables, pipeline placeholders and ranks."""
    for pool in job.pools:
        for path, task in pool.tasks():
            command = task.get("command") or []
            for field in ("command", "args"):
                for index, word in enumerate(task.get(field) or ()):
                    where = (*path, field, index)
                    if found := _PLACEHOLDER.search(word):
                        fix = (
                            "write the value when the pipeline is compiled, or give the whole pool list as a parameter"
                        )
                        yield Violation("VP705", where, found[0], "a value: it is not replaced reliably there", fix)
                    elif not _has_shell([*command, *(task.get("args") or [])]) and (found := _VARIABLE.search(word)):
                        fix = "read the variable in the program, or start the container with a shell and -c"
                        yield Violation("VP704", where, found[0], "a value: no shell replaces it", fix)
        for where, name, _ in pool.environment():
            if name in _OF_A_PROCESS:
                expected = "nothing: it would be the same in all replicas, and Vertex AI's own counts nodes"
                yield Violation("VP706", where, name, expected, "start torchrun from CLUSTER_SPEC")


def _has_shell(words: Sequence[str]) -> bool:
    """Whether the container's first words are a shell with -c (or -lc and so on)."""
    first = words[0].rpartition("/")[2] if words else ""
    return first in _SHELLS and any(re.fullmatch(r"-[a-z]*c", word) for word in words[1:4])
