"""Check whether each account may do what the run needs on each bucket, secret, table, account and on the project.

A service tells an account only what it may do itself, so each question is asked as the account that needs it: this
machine's credentials for the submitter, and impersonation for the accounts of pipeline and jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.access.needs import Need, conditions, needs
from vlmpipe.access.table import Account, UseName, load_table
from vlmpipe.doctor import remedies
from vlmpipe.doctor.conditions import conditional_grants
from vlmpipe.doctor.google_api import Answer, CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

ACCOUNTS: tuple[Account, ...] = ("submitter", "pipeline", "trainer")  # of a run
MAX_FIELDS = 3  # named in a row
UPLOAD = "aiplatform.models.upload"
TESTED, UPLOADS = "iam-test-permissions", "vertex-registry-role"  # assumptions
WORDS: dict[UseName, str] = {
    "look": "looks up",
    "read": "reads",
    "add": "adds to",
    "write": "writes",
    "act_as": "acts as",
}


@dataclass(frozen=True)
class Asker:
    """One account of the run, and its requests or why there are none. reader: this machine's account."""

    account: Account
    email: str
    api: GoogleApi | CannotSee
    reader: GoogleApi

    @property
    def member(self) -> str:
        """The account as IAM names it."""
        return remedies.member(self.email) if self.email else "user:YOUR_ACCOUNT"


def askers(config: RunConfig, submitter_api: GoogleApi) -> list[Asker]:
    """The run's accounts: this machine's, the pipeline's, the jobs'."""
    emails = {
        "pipeline": config.gcp.service_account,
        "trainer": config.gcp.job_service_account or config.gcp.service_account,
    }
    result = [Asker("submitter", submitter_api.email, submitter_api, submitter_api)]
    for account in ACCOUNTS[1:]:
        email = emails[account]
        if not email:
            unnamed = CannotSee("gcp.service_account is empty: Vertex AI takes a default account")
            result.append(Asker(account, "", unnamed, submitter_api))
            continue
        try:
            result.append(Asker(account, email, submitter_api.as_account(email), submitter_api))
        except CannotSee as error:
            result.append(Asker(account, email, error, submitter_api))
    return result


def permission_rows(config: RunConfig, asker: Asker) -> Iterator[Row]:
    """A row for each resource that the account needs, and one for the project. One request each."""
    requested = [need for need in needs(config) if need.account == asker.account]
    if isinstance(asker.api, CannotSee):
        text = f"{len(requested) + 1} questions about {asker.email or 'this account'} are open: {asker.api.why}"
        yield unseen(asker.account, text, asker.api.fix)
        return
    if asker.account != "submitter":
        yield ok(asker.account, f"asked as {asker.email}")
    for need in requested:
        try:
            answer = _ask(asker.api, need)
            yield _answered(asker, answer, _row(config, asker, need, answer))
        except CannotSee as error:
            yield unseen(asker.account, f"{_question(need)}: {error.why}", error.fix)
    try:
        yield _project_row(config, asker, asker.api)
    except CannotSee as error:
        yield unseen(asker.account, f"roles on project {config.gcp.project}: {error.why}", error.fix)


def _ask(api: GoogleApi, need: Need) -> Answer:
    if need.kind == "bucket":
        path = f"/storage/v1/b/{need.resource}/iam/testPermissions"
        return api.get("storage", path, permissions=list(need.permissions))
    if need.kind == "secret":
        return api.granted("secretmanager", f"/v1/{need.resource}", need.permissions)
    if need.kind == "table":
        project, dataset, table = need.resource.rsplit(".", 2)
        path = f"/bigquery/v2/projects/{project}/datasets/{dataset}/tables/{table}"
        return api.granted("bigquery", path, need.permissions)
    return api.granted("iam", f"/v1/projects/-/serviceAccounts/{need.resource}", need.permissions)


def _answered(asker: Asker, answer: Answer, row: Row) -> Row:
    """The row, with what it shows: 400 is said of a permission that the service does not know of such a resource."""
    if answer.status == 400:
        return row.showing(TESTED, False)
    return row.showing(TESTED, True) if answer.status == 200 and asker.account != "submitter" else row


def _row(config: RunConfig, asker: Asker, need: Need, answer: Answer) -> Row:
    question = _question(need)
    if answer.status == 404:
        return missing(asker.account, f"{question}: there is no such {need.kind}", _creation(config, need))
    if answer.status != 200:
        return unseen(asker.account, f"{question}: {answer.status} {answer.message}")
    lacking = set(need.permissions) - set(answer.content.get("permissions", ()))
    if not lacking:
        return ok(asker.account, question)
    text = f"{question}: may not {', '.join(permission for permission in need.permissions if permission in lacking)}"
    if need.kind == "secret":
        text += ", or there is no such secret (Secret Manager gives the same answer)"
    fix = "\n".join(_grant(need, asker.member, role) for role in need.roles(lacking))
    if need.kind == "bucket":
        return _unless_conditional(asker, need.resource, text, fix)
    return missing(asker.account, text, fix)


def _unless_conditional(asker: Asker, bucket: str, text: str, fix: str) -> Row:
    """Report missing permissions, but where a grant with a condition may give it for the names that the run needs."""
    titles = conditional_grants(asker.reader, bucket, asker.email)
    if titles is None:
        note = "grants with a condition are not counted, because your account may not read the policies"
        return missing(asker.account, f"{text} ({note})", fix)
    if not titles:
        return missing(asker.account, text, fix)
    text += f", but for a grant with a condition ({', '.join(titles)}), which may allow it for some names"
    return unseen(asker.account, text, f"see whether the condition holds for the run, or grant without one:\n{fix}")


def _question(need: Need) -> str:
    """Describe what the account does, the resource, and the fields that name it."""
    uses = load_table().smallest_roles(need.kind, set(need.uses))
    fields = ", ".join(need.fields[:MAX_FIELDS])
    more = f" and {len(need.fields) - MAX_FIELDS} more" if len(need.fields) > MAX_FIELDS else ""
    resource = f"gs://{need.resource}" if need.kind == "bucket" else need.resource
    return f"{', '.join(WORDS[use] for use in uses)} {resource} ({fields}{more})"


def _grant(need: Need, member: str, role: str) -> str:
    if need.kind == "bucket":
        return remedies.grant_on_bucket(need.resource, member, role)
    if need.kind == "secret":
        return remedies.grant_on_secret(need.resource, member, role)
    if need.kind == "table":
        return remedies.grant_on_table(need.resource, member, role)
    return remedies.grant_on_account(need.resource, member, role)


def _creation(config: RunConfig, need: Need) -> str:
    if need.kind == "bucket":
        return remedies.create_bucket(need.resource, config.gcp.project, config.gcp.location)
    if need.kind == "account":
        return remedies.create_account(need.resource)
    return f"correct {need.fields[0]}"


def _project_row(config: RunConfig, asker: Asker, api: GoogleApi) -> Row:
    """Permissions of the account on the whole project."""
    project = config.gcp.project
    met = conditions(config)
    roles = [line for line in load_table().project if line.account == asker.account and met.get(line.when, False)]
    permissions = tuple(dict.fromkeys(permission for line in roles for permission in line.permissions))
    answer = api.granted("cloudresourcemanager", f"/v1/projects/{project}", permissions)
    question = f"roles on project {project}"
    if answer.status == 404:
        return missing(asker.account, f"{question}: there is no such project", "correct gcp.project")
    if answer.status != 200:
        return _answered(asker, answer, unseen(asker.account, f"{question}: {answer.status} {answer.message}"))
    has = set(answer.content.get("permissions", ()))
    lacking = [line for line in roles if not set(line.permissions) <= has]
    if not lacking:
        line = ok(asker.account, question)
        return _answered(asker, answer, line.showing(UPLOADS, True) if UPLOAD in permissions else line)
    names = ", ".join(permission for line in lacking for permission in line.permissions if permission not in has)
    fixes = [remedies.grant_on_project(project, asker.member, line.role) for line in lacking]
    line = _unless_conditional(asker, "", f"{question}: may not {names}", "\n".join(fixes))
    of_role = {permission for line in roles if UPLOAD in line.permissions for permission in line.permissions}
    if UPLOAD in of_role - has and has & of_role:  # it has the role, by its other permissions
        line = line.showing(UPLOADS, False)
    return _answered(asker, answer, line)
