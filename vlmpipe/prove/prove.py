"""Makes the tiny model and the samples, checks the laws on a run file's trainer, and writes what was found."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vlmpipe.config.run_config import RunConfig
from vlmpipe.prove.laws import LAWS, Proof, Verdict
from vlmpipe.prove.trainer_runs import LocalTrainer, model_section
from vlmpipe.report.pages import STYLE
from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import ConfigError

OUR_NAME = "vlmpipe"
PACKAGES = ("torch", "transformers", "deepspeed")
DEFAULT_RUN_FILE = Path(__file__).with_name("own_trainer.yaml")


@dataclass(frozen=True)
class Proven:
    """The verdicts on a trainer, and what they were reached with."""

    trainer: str
    model_type: str
    command: str
    versions: dict[str, str]
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.state in ("does not hold", "not run")]

    def as_json(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer,
            "model_type": self.model_type,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "command": self.command,
            "versions": self.versions,
            "laws": [one.as_json() for one in self.verdicts],
        }


def prove(
    config: RunConfig,
    folder: Path,
    *,
    command: str = "",
    laws: Sequence[str] = (),
    limit_s: float = 120.0,
    reached: Callable[[Verdict], None] = lambda verdict: None,
) -> Proven:
    """Check the laws, or those named, and write `prove.json` and `prove.html` into `folder`.

    Raises ConfigError for an unknown law, a family without a tiny model, and a folder with files in it.

    Args:
        command: how it was called, for the page.
        limit_s: seconds after which a start is ended.
        reached: called with each verdict.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which transformers imports, warns of no GPU
    from vlmpipe.prove.reference import Reference
    from vlmpipe.prove.sample_set import write_samples
    from vlmpipe.prove.tiny_model import type_of, write_tiny_model

    if unknown := [name for name in laws if name not in LAWS]:
        raise ConfigError(f"no law {unknown[0]!r}", expected=f"one of {', '.join(LAWS)}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", expected="a new folder", fix="delete it or name another one")
    model_type, family = type_of(config.model), config.model.family
    model, samples = folder.absolute() / "model", write_samples(folder.absolute() / "samples")
    write_samples(folder.absolute() / "samples" / "text_only", text_only=True)
    write_tiny_model(model_type, model)
    own = config.train.trainer
    section = model_section(family if family == model_type else "hf", model)
    trainer = LocalTrainer(config, section, folder.absolute() / "samples", folder.absolute() / "outputs", limit_s)
    proof = Proof(trainer, lambda exported: Reference(exported or model).losses(samples))
    verdicts = []
    for verdict in proof.verdicts(laws):
        verdicts.append(verdict)
        reached(verdict)
    proven = Proven(own.name if own else OUR_NAME, model_type, command, _versions(trainer), tuple(verdicts))
    (folder / "prove.json").write_text(json.dumps(proven.as_json(), indent=1), encoding="utf-8")
    (folder / "prove.html").write_text(page(proven.as_json()), encoding="utf-8")
    return proven


def page(content: Mapping[str, Any]) -> str:
    """The content of prove.json as a page."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("vlmpipe.prove.prove", "."), autoescape=True)
    return environment.get_template("page.html.j2").render(content, style=Markup(STYLE))


def _versions(trainer: LocalTrainer) -> dict[str, str]:
    """Those of the environment that the trainer runs in."""
    found = {"vlmpipe": __version__}
    if trainer.config.train.trainer is None:
        found |= {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return found | trainer.told_versions()
