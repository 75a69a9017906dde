"""Rules VP70x: secrets, variables and placeholders in a container's environment, command and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlmpipe.catalog.nccl import NET_VARIABLE, NO_PLUGIN, load_misfits, load_networks
from vlmpipe.config.launch_commands import runs_shell, variable_in
from vlmpipe.job_spec.read_forms import ReadTask
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import Violation
from vlmpipe.trainer.secret_detection import form_of_secret, is_secret_name, may_be_secret

_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_ASSIGNMENT = re.compile(r"(?:^|[\s;&'\"])-{0,2}([A-Za-z][\w-]*)[=](\"[^\"]*\"|'[^']*'|[^\s;&]*)")
_PLACEHOLDER = re.compile(r"\{\{\$[^}]*\}\}|\{\{channel:[^}]*\}\}")
_TRIAL = re.compile(r"(--?[A-Za-z][\w-]*=)?\{\{\s*[A-Za-z_]\w*\s*\}\}")  # as guides write a trial's parameter
_OF_A_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
CHOSEN_BY_NCCL = "VP710"
FIX = "read it from Secret Manager in the program, as the job's service account; the spec is visible to many"


def check(job: Job) -> Iterator[Violation]:
    """Secrets, what does not reach a program as written, and NCCL variables of other machines."""
    for rules in (_secrets, _unreplaced, _nccl):
        for pool in job.pools:
            yield from rules(job, pool)


def _secrets(_job: Job, pool: Pool) -> Iterator[Violation]:
    """No violation contains a secret or a part of one."""
    for path, name, value in pool.environment():
        if is_secret_name(name) and may_be_secret(name, value):
            yield Violation("VP701", path, f"{name} with a value of {len(value)} characters", "no secrets", FIX)
        elif form := form_of_secret(value):
            yield Violation("VP702", path, f"{name} with {form} of {len(value)} characters", "no secrets", FIX)
    for path, words in pool.word_lists():
        for index, (previous, word) in enumerate(zip(["", *words], words, strict=False)):
            if secret := secret_in_word(word, previous):
                yield Violation("VP703", (*path, index), secret, "no secrets", FIX)


def secret_in_word(word: str, previous: str) -> str:
    """Secret in a word of a command; empty for none."""
    option = _OPTION.fullmatch(previous)
    for name, value in _ASSIGNMENT.findall(word):
        if is_secret_name(name) and may_be_secret(name, value):
            return f"{name} with a value"
    if option and is_secret_name(option[1]) and not word.startswith("-") and may_be_secret(option[1], word):
        return f"a value for --{option[1]}"
    form = form_of_secret(word) or form_of_secret(word.partition("=")[2])
    return f"{form} of {len(word)} characters" if form else ""


def _unreplaced(_job: Job, pool: Pool) -> Iterator[Violation]:
    """Shell variables, pipeline placeholders and ranks."""
    for path, word in pool.words():
        if match := _PLACEHOLDER.search(word):
            fix = "write the value when the pipeline is compiled, or give the whole pool list as a parameter"
            yield Violation("VP705", path, match[0], "a value: it is not replaced reliably there", fix)
        elif match := _TRIAL.fullmatch(word):
            fix = "leave it out: a tuning job appends --NAME=VALUE of each parameter; otherwise write the value"
            yield Violation("VP709", path, word, "a value: nothing replaces it", fix)
        elif (variable := variable_in(word)) and not _runs_shell(pool, path[2]):
            fix = "read the variable in the program, or start the container with a shell and -c"
            yield Violation("VP704", path, variable, "a value: no shell replaces it", fix)
    for path, name, _ in pool.environment():
        if name in _OF_A_PROCESS:
            expected = "nothing: it would be the same in all replicas, and Vertex AI's own counts nodes"
            yield Violation("VP706", path, name, expected, "start torchrun from CLUSTER_SPEC")


def _runs_shell(pool: Pool, name: str | int) -> bool:
    """Return whether a task of the pool, its container or its package, starts a shell."""
    task: ReadTask = pool.container if name == "container_spec" else pool.package
    return runs_shell([*task.get("command", ()), *task.get("args", ())])


def _nccl(job: Job, pool: Pool) -> Iterator[Violation]:
    """NCCL variables of networks that the pool's machine does not have."""
    machine = job.machine(pool)
    if machine is None or not machine.network or not (pool.accelerator_type or machine.accelerators_fixed):
        return
    network = load_networks()[machine.network]
    instead = f"uses {network.carries}" if network.plugin == NO_PLUGIN else f"has {network.plugin}"
    for path, name, value in pool.environment():
        for misfit in load_misfits():
            if machine.network not in misfit.suits and misfit.means(name, value):
                actual = f"{name}={value}" if name == NET_VARIABLE else name
                expected = f"no variable for {misfit.of}: {machine.machine_type} {instead}"
                if misfit.rule == CHOSEN_BY_NCCL:
                    expected = f"NCCL's own choice of {misfit.of}"
                fix = f"leave it out: {misfit.why}"
                yield Violation(misfit.rule, path, f"{actual} on {machine.machine_type}", expected, fix)
