"""All questions of `vlmpipe doctor`, several at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vlmpipe.access.needs import named
from vlmpipe.doctor.addresses import address_rows
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.hub import hub_rows
from vlmpipe.doctor.images import image_rows
from vlmpipe.doctor.machines import machine_rows
from vlmpipe.doctor.permissions import askers, permission_rows
from vlmpipe.doctor.project import api_rows, region_row
from vlmpipe.doctor.quotas import quota_rows
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.platforms.example_values import EXAMPLE_PROJECT
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.errors import UserError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

AT_ONCE = 8
Question = tuple[str, Callable[[], Iterable[Row]]]  # with the subject of its rows


def examine(config: RunConfig) -> list[Row]:
    """A row for each question about what the run file names, in the order in which a person reads them."""
    first, api = _login(config)
    questions = [*_of_project(config, api), ("address", lambda: address_rows(config, api and api.credentials))]
    questions += [("hub", functools.partial(hub_rows, run.model)) for run in config.stage_runs().values()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_answered, questions))
    return list(dict.fromkeys([*first, *(line for rows in answers for line in rows)]))


def _login(config: RunConfig) -> tuple[list[Row], GoogleApi | None]:
    """Rows on project and login, and the requests of this machine's account; none where they are not needed."""
    project = config.gcp.project
    rows = [region_row(config)] if project else []
    if not project:
        problems = platform_of(DEFAULT).missing(config)
        fields = ", ".join(problem.field for problem in problems if problem.is_missing)
        text = f"gcp.project is empty: nothing is asked about a project; a run on Vertex AI needs {fields}"
        rows.append(unseen("project", text, "set gcp.project"))
    if project == EXAMPLE_PROJECT:
        text = f"gcp.project: {project} is the example project, not one of yours"
        return [unseen("project", text, "set gcp.project, or source env.sh and use make"), *rows], None
    if not any(resource.kind != "image" for resource in named(config)):
        return rows, None
    try:
        api = GoogleApi.own(project)
    except CannotSee as error:
        return [unseen("login", error.why, error.fix), *rows], None
    except UserError as error:
        return [missing("login", error.found, error.fix.splitlines()[0]), *rows], None
    return [ok("login", f"asked as {api.email or 'yourself'}, in the place of submitter"), *rows], api


def _of_project(config: RunConfig, api: GoogleApi | None) -> list[Question]:
    if api is None or not api.project:
        return []
    return [
        ("APIs", lambda: api_rows(config, api)),
        ("quota", lambda: quota_rows(config, api)),
        ("image", lambda: image_rows(config, api)),
        ("machine", lambda: machine_rows(config, api)),
        ("accounts", lambda: [line for asker in askers(config, api) for line in permission_rows(config, asker)]),
    ]


def _answered(question: Question) -> list[Row]:
    """The rows of a question, also of one that was left without an answer."""
    subject, asked = question
    try:
        return list(asked())
    except CannotSee as error:
        return [unseen(subject, error.why, error.fix)]
