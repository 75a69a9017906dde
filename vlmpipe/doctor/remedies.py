"""Commands that add missing grants and resources. Each is a line for a shell; tests run them on a local server."""

from __future__ import annotations

import shlex


def member(email: str) -> str:
    """A service account as IAM names it."""
    return f"serviceAccount:{email}"


def enable(project: str, *services: str) -> str:
    """Enable APIs."""
    return _command("gcloud", "services", "enable", *services, f"--project={project}")


def charge(project: str) -> str:
    """Let requests of a person's login count against a project."""
    return _command("gcloud", "auth", "application-default", "set-quota-project", project)


def grant_on_project(project: str, member: str, role: str) -> str:
    """Grant a role on the whole project."""
    return _binding("gcloud projects add-iam-policy-binding", project, member, role, "--condition=None")


def grant_on_account(email: str, member: str, role: str) -> str:
    """Grant a role on a service account."""
    return _binding(
        "gcloud iam service-accounts add-iam-policy-binding", email, member, role, f"--project={_home(email)}"
    )


def grant_on_bucket(bucket: str, member: str, role: str) -> str:
    """Grant a role on a bucket."""
    return _binding("gcloud storage buckets add-iam-policy-binding", f"gs://{bucket}", member, role)


def grant_on_secret(secret: str, member: str, role: str) -> str:
    """Grant a role on a secret, projects/PROJECT/secrets/NAME."""
    _, project, _, name = secret.split("/")
    return _binding("gcloud secrets add-iam-policy-binding", name, member, role, f"--project={project}")


def grant_on_table(table: str, member: str, role: str) -> str:
    """Grant a role on a table, PROJECT.DATASET.TABLE."""
    project, dataset, name = table.rsplit(".", 2)
    named = f"{project}:{dataset}.{name}"
    return _command("bq", "add-iam-policy-binding", f"--member={member}", f"--role={role}", named)


def grant_on_repository(location: str, project: str, repository: str, member: str) -> str:
    """Let an account read the images of a repository."""
    where = (f"--location={location}", f"--project={project}")
    command = "gcloud artifacts repositories add-iam-policy-binding"
    return _binding(command, repository, member, "roles/artifactregistry.reader", *where)


def create_bucket(bucket: str, project: str, location: str) -> str:
    """Make a bucket in the run's region."""
    where = (f"--project={project}", f"--location={location}", "--uniform-bucket-level-access")
    return _command("gcloud", "storage", "buckets", "create", f"gs://{bucket}", *where)


def create_repository(location: str, project: str, repository: str) -> str:
    """Make a repository of images."""
    where = (f"--location={location}", f"--project={project}", "--repository-format=docker")
    return _command("gcloud", "artifacts", "repositories", "create", repository, *where)


def create_account(email: str) -> str:
    """Make a service account."""
    return _command("gcloud", "iam", "service-accounts", "create", email.partition("@")[0], f"--project={_home(email)}")


def raise_quota(project: str, quota: str, region: str, limit: int) -> str:
    """Ask for a higher limit of a quota, by its metric: its id is looked up."""
    service = "--service=aiplatform.googleapis.com"
    lookup = f"gcloud beta quotas info list {service} --project={shlex.quote(project)} --filter=metric={quota}"
    command = _command("gcloud", "beta", "quotas", "preferences", "create", service, f"--project={project}")
    rest = _command(f"--preferred-value={limit}", f"--dimensions=region={region}")
    return f"{command} {rest} --quota-id=\"$({lookup} --format='value(quotaId)')\""


def _home(email: str) -> str:
    """The project that a service account lies in."""
    return email.partition("@")[2].removesuffix(".iam.gserviceaccount.com")


def _binding(command: str, resource: str, member: str, role: str, *settings: str) -> str:
    return _command(*command.split(), resource, f"--member={member}", f"--role={role}", *settings)


def _command(*words: str) -> str:
    return shlex.join(words)
