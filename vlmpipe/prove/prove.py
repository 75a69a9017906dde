"""Makes the tiny model and the samples, checks the laws on a run file's trainer, and writes the verdicts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jinja2
from markupsafe import Markup

from vlmpipe.config.run_config import RunConfig
from vlmpipe.prove.laws import LAWS, Proof, Verdict
from vlmpipe.prove.trainer_runs import LocalTrainer, model_section
from vlmpipe.report.pages import STYLE
from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.external.program import program_digest
from vlmpipe.trainer.storage.local import LocalStorage

OUR_NAME = "vlmpipe"
UNFINISHED = "unfinished.json"  # verdicts of a call that has not ended
PACKAGES = ("torch", "transformers", "deepspeed")
DEFAULT_RUN_FILE = Path(__file__).with_name("own_trainer.yaml")


class StoppedError(UserError):
    """Ctrl-C while laws were checked. The call continues in `folder`."""

    def __init__(self, folder: Path, checked: int, laws: int) -> None:
        self.folder = folder
        super().__init__(
            f"stopped: {checked} of {laws} laws are checked",
            fix=f"the same command continues, with --output {folder}",
            code=ExitCode.INTERRUPTED,
        )


@dataclass(frozen=True)
class Proven:
    """The verdicts on a trainer, and the versions that they were reached with."""

    trainer: str
    model_type: str
    command: str
    versions: dict[str, str]
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state in ("does not hold", "not run")]

    def as_json(self) -> dict[str, object]:
        return {
            "trainer": self.trainer,
            "model_type": self.model_type,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "command": self.command,
            "versions": self.versions,
            "laws": [verdict.as_json() for verdict in self.verdicts],
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

    The same call continues in the folder of one that was stopped: the laws that it found to hold are taken over, unless
    the trainer's program has changed.
    Raises ConfigError for an unknown law, a family without a tiny model, and a folder with other files in it,
    StoppedError after Ctrl-C.

    Args:
        command: how it was called, for the page.
        limit_s: seconds after which a start is ended.
        reached: called with each verdict, those taken over first.
    """
    if unknown := [name for name in laws if name not in LAWS]:
        raise ConfigError(f"no law {unknown[0]!r}", expected=f"one of {', '.join(LAWS)}")
    program = program_digest(config.train.trainer)
    asked = {"version": __version__, "run_file": config.digest(), "program": program, "limit_s": limit_s}
    earlier = _earlier(folder, asked)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which transformers imports, warns of no GPU
    from vlmpipe.prove.reference import Reference
    from vlmpipe.prove.sample_set import write_samples
    from vlmpipe.prove.tiny_model import type_of, write_tiny_model

    model_type, family = type_of(config.model), config.model.family
    model, samples = folder.absolute() / "model", write_samples(folder.absolute() / "samples")
    write_samples(folder.absolute() / "samples" / "text_only", text_only=True)
    write_tiny_model(model_type, model)
    external = config.train.trainer
    section = model_section(family if family == model_type else "hf", model)
    trainer = LocalTrainer(config, section, folder.absolute() / "samples", folder.absolute() / "outputs", limit_s)
    proof = Proof(trainer, lambda exported: Reference(exported or model).losses(samples))
    names = [name for name in LAWS if name in (laws or LAWS)]
    for name in names:
        if name in earlier:
            reached(earlier[name])
    try:
        for verdict in proof.verdicts([name for name in names if name not in earlier]):
            earlier[verdict.law] = verdict
            _write_unfinished(folder, asked, earlier)
            reached(verdict)
    except KeyboardInterrupt:
        raise StoppedError(folder, sum(name in earlier for name in names), len(names)) from None
    verdicts = [earlier[name] for name in names]
    proven = Proven(external.name if external else OUR_NAME, model_type, command, _versions(trainer), tuple(verdicts))
    (folder / "prove.json").write_text(json.dumps(proven.as_json(), indent=1), encoding="utf-8")
    (folder / "prove.html").write_text(page(proven.as_json()), encoding="utf-8")
    (folder / UNFINISHED).unlink(missing_ok=True)
    return proven


def _earlier(folder: Path, asked: Mapping[str, object]) -> dict[str, Verdict]:
    """The verdicts of a stopped call in this folder, whose starts are removed. Raises ConfigError for other files."""
    if not folder.exists() or not any(folder.iterdir()):
        _write_unfinished(folder, asked, {})
        return {}
    try:
        unfinished = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
        before, laws = unfinished["asked"], [Verdict(**law) for law in unfinished["laws"]]
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # no file that a proof has written
        what = "not empty"
    else:
        what = "of other settings or another program" if laws and before != asked else ""
    if what:
        raise ConfigError(f"{folder} is {what}", expected="a new folder", fix="delete it or name another one")
    for name in ("model", "samples", "outputs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return {law.law: law for law in laws if law.state == "holds"}


def _write_unfinished(folder: Path, asked: Mapping[str, object], verdicts: Mapping[str, Verdict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"asked": asked, "laws": [verdict.as_json() for verdict in verdicts.values()]}
    LocalStorage(folder).write(UNFINISHED, json.dumps(content, indent=1).encode())


def page(content: Mapping[str, object]) -> str:
    """The content of prove.json as a page."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("vlmpipe.prove.prove", "."), autoescape=True)
    return environment.get_template("page.html.j2").render(content, style=Markup(STYLE))


def _versions(trainer: LocalTrainer) -> dict[str, str]:
    """Return the versions of vlmpipe and of the packages that the trainer runs with."""
    versions = {"vlmpipe": __version__}
    if trainer.config.train.trainer is None:
        versions |= {"python": platform.python_version()} | {
            name: importlib.metadata.version(name) for name in PACKAGES
        }
    return versions | trainer.told_versions()
