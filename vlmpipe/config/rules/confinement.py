"""Fields of a run file that lead beyond the limits of a server of tools (`vlmpipe mcp`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.sources.data_source import function_named
from vlmpipe.trainer.confinement.limits import HUB, SCHEME, Limits, limits

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

# Sections that only services use: their paths are those of other machines, and local runs open none of their addresses.
ELSEWHERE = ("gcp.", "kubeflow.", "deploy.", "cluster.", "register.serving.")
# Variables of libraries that load no code, where their value is no path.
TUNING = re.compile(r"(CUDA|GLOO|MKL|NCCL|NVIDIA|OMP|TORCH_NCCL|TOKENIZERS)_\w+|PYTORCH(_CUDA)?_ALLOC_CONF")
WANDB = "https://api.wandb.ai"


def confinement_problems(config: RunFields) -> Iterator[Problem]:
    """Yield, for a command of such a server, each field that leads out of its root or runs code of the user's own."""
    if not (held := limits()):
        return
    for field, text in _texts(config.to_dict()):
        if not field.startswith(ELSEWHERE) and (objection := held.objection(text)):
            yield Problem(field, f"found {text!r}, {objection}; {_expected(held)}")
    yield from _sent(config, held)
    for field in _own_code(config):
        text = "runs code or sets variables of your own, which could do all that the server's user may; expected none"
        yield Problem(field, f"{text}, or a person who runs it")


def service_confinement_problems(config: RunFields, unused: str) -> Iterator[Problem]:
    """Yield the same for addresses that a service is given: addresses of the sections that it uses, so not `unused`."""
    if not (held := limits()):
        return
    for field, text in _texts(config.to_dict()):
        is_told = field.startswith(ELSEWHERE) and not field.startswith(unused) and SCHEME.match(text)
        if is_told and (objection := held.objection(text)):
            yield Problem(field, f"found {text!r}, {objection}; {_expected(held)}")


def _expected(held: Limits) -> str:
    listed = f", or one of {', '.join(held.addresses)}" if held.addresses else ""
    return f"expected a path below the root{listed}"


def _sent(config: RunFields, held: Limits) -> Iterator[Problem]:
    """Yield sections that send to a service, or fetch from the web, without naming its address."""
    uses = {
        "data.fetch": ("https://", config.data.fetch),
        "register.hub": (HUB, bool(config.register_.hub)),
        "train.wandb.project": (WANDB, bool(config.train.wandb.project)),
    }
    for field, (address, is_used) in uses.items():
        if is_used and (objection := held.objection(address)):
            yield Problem(field, f"uses {address}, {objection}; {_expected(held)}")


def _own_code(config: RunFields) -> Iterator[str]:
    for source in [config.data.source, *(source.uri for source in config.data.sources)]:
        if function_named(source):
            yield "data.source" if source == config.data.source else "data.sources"
    if config.train.trainer:
        yield "train.trainer"
    if config.evaluate.lmms_eval:
        yield "evaluate.lmms_eval"
    for name, value in config.cluster.env.items():
        if not TUNING.fullmatch(name) or "PLUGIN" in name or "/" in value:
            yield f"cluster.env.{name}"


def _texts(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and value:
        yield path, value
