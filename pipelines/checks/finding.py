"""A finding of a check of a run file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.errors import ExitCode, UserError


@dataclass(frozen=True)
class Finding:
    """The result of one check. `code` is the exit code of a failure."""

    subject: str
    state: Literal["ok", "warning", "failed", "unchecked"]
    text: str
    code: int = 0


def findings_of(subject: str, check: Callable[[RunConfig], Iterator[Finding]], config: RunConfig) -> Iterator[Finding]:
    """The findings of a check; the last one is its failure."""
    try:
        yield from check(config)
    except UserError as error:
        yield Finding(subject, "failed", error.text(), int(error.code))


def of_stages(by_stage: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Findings by stage in one list: those of a stage name it, except where all stages have the same."""
    first = next(iter(by_stage.values()))
    shared = {finding for finding in first if all(finding in findings for findings in by_stage.values())}
    of_one_stage = [
        replace(finding, subject=f"{stage}: {finding.subject}")
        for stage, findings in by_stage.items()
        for finding in findings
        if finding not in shared
    ]
    return [*(finding for finding in first if finding in shared), *of_one_stage]


def exit_code(findings: list[Finding]) -> int:
    """0, or the code of the first failure."""
    return next((finding.code or ExitCode.CONFIG for finding in findings if finding.state == "failed"), ExitCode.OK)
