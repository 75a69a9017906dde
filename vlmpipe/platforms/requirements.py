"""Rules of a run file that several platforms share: images, tokens and files that a job elsewhere needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from vlmpipe.config.service_forms import Form
from vlmpipe.config.validation_errors import MISSING, Problem, RunFileError, show
from vlmpipe.trainer.config.sources.data_source import BIGQUERY

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NAMED_TEMPLATES = ("", "native", "vlmpipe")
NOT_READ_HERE = ("gcp.", "cluster.image_uri")  # fields that a run file for this machine does without


def serving_image(config: RunConfig, form: Form) -> list[Problem]:
    """The image that serves, if there is a section deploy."""
    if config.deploy is None or form.fits(config.deploy.image_uri):
        return []
    return [Problem("deploy.image_uri", f"found {show(config.deploy.image_uri)}, expected {form.expected}")]


def benchmark_image(config: RunConfig, form: Form) -> list[Problem]:
    """The image of the job benchmark, if there is one."""
    lmms_eval = config.evaluate.lmms_eval
    if lmms_eval is None or form.fits(lmms_eval.image_uri):
        return []
    return [Problem("evaluate.lmms_eval.image_uri", f"found {show(lmms_eval.image_uri)}, expected {form.expected}")]


def hub_token(config: RunConfig) -> list[Problem]:
    """The token of an upload to the hub: a step elsewhere has nothing of this machine's environment."""
    if config.register_.hub is None or config.register_.hub.token_secret:
        return []
    text = "missing; expected projects/PROJECT/secrets/NAME, of a token that may write"
    return [Problem("register.hub.token_secret", text)]


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The fields that name files which a job reads, with their values."""
    yield from config.data.addresses().items()
    if config.data.chat_template not in NAMED_TEMPLATES:
        yield "data.chat_template", config.data.chat_template
    if config.data.exclude:
        yield "data.exclude", config.data.exclude
    if config.evaluate.lmms_eval:
        yield "evaluate.lmms_eval.include_path", config.evaluate.lmms_eval.include_path
    for number, benchmark in enumerate(config.evaluate.benchmarks):
        for field in ("uri", "annotations", "images"):
            yield f"evaluate.benchmarks.{number}.{field}", getattr(benchmark, field)


def require_files(config: RunConfig, place: str, is_reached: Callable[[str], bool], expected: str) -> None:
    """Raise RunFileError unless jobs at `place` can read the run's files."""
    problems = [
        Problem(field, f"found {show(uri)}, expected {expected}: a job does not see this machine's files")
        for field, uri in _files(config)
        if uri and not uri.startswith(("builtin:", BIGQUERY)) and not is_reached(uri)
    ]
    raise_problems(config, place, problems)


def violated(config: RunConfig, of_fields: Mapping[str, Form]) -> list[Problem]:
    """A problem for each field whose value has not its form."""
    problems, content = [], config.to_dict()
    for path, form in of_fields.items():
        section, _, field = path.partition(".")
        value = content[section][field]
        if not form.fits(value):
            problems.append(Problem(path, f"{f'found {show(value)}' if value else MISSING}, expected {form.expected}"))
    return problems


def raise_problems(config: RunConfig, place: str, problems: list[Problem], *, fix: str = "") -> None:
    """Raise RunFileError if there are any. `fix`: what to do where fields are missing that `place` alone reads."""
    if problems:
        lacks = any(problem.is_missing and problem.field.startswith(NOT_READ_HERE) for problem in problems)
        raise RunFileError(f"run file {config.name}, for {place}", problems, fix=fix if lacks else "")
