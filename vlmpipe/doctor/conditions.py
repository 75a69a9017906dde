"""Grants with a condition, which testIamPermissions on a bucket or a project does not count.

A condition on names of objects, or of resources inside a project, holds for some of them only, and the question names
none. So an account that lacks a permission there may have it where the run needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vlmpipe.doctor.google_api import CannotSee

if TYPE_CHECKING:
    from vlmpipe.doctor.google_api import GoogleApi

# "Policies with any conditional role bindings must specify version 3" (GetPolicyOptions.requested_policy_version)
POLICY_VERSION = 3
ONE_ACCOUNT = ("serviceAccount:", "user:")  # other members, such as groups, may stand for any account


def conditional_grants(reader: GoogleApi, bucket: str, email: str) -> tuple[str, ...] | None:
    """Titles of conditions on roles that an account may have by the policies of a bucket and of the project.

    Args:
        reader: asks for the policies.
        bucket: "" for the project's policy alone.
        email: of the account; "" for an unknown one, which any member may be.

    None where `reader` may not read a policy: then nothing is known.
    """
    policies = [_of_project(reader), *([_of_bucket(reader, bucket)] if bucket else [])]
    if any(policy is None for policy in policies):
        return None
    return tuple(dict.fromkeys(title for policy in policies for title in _titles(policy or {}, email)))


def _of_project(reader: GoogleApi) -> dict[str, object] | None:
    body = {"options": {"requestedPolicyVersion": POLICY_VERSION}}
    return _policy(reader, "POST", "cloudresourcemanager", f"/v1/projects/{reader.project}:getIamPolicy", json=body)


def _of_bucket(reader: GoogleApi, bucket: str) -> dict[str, object] | None:
    asked = {"optionsRequestedPolicyVersion": POLICY_VERSION}
    return _policy(reader, "GET", "storage", f"/storage/v1/b/{bucket}/iam", params=asked)


def _policy(reader: GoogleApi, method: str, service: str, path: str, **settings: Any) -> dict[str, object] | None:
    try:
        answer = reader.ask(method, service, path, **settings)
    except CannotSee:
        return None
    return answer.content if answer.status == 200 else None


def _titles(policy: dict[str, Any], email: str) -> Iterator[str]:
    for binding in policy.get("bindings", ()):
        condition = binding.get("condition")
        if condition and any(_may_be(member, email) for member in binding.get("members", ())):
            yield str(condition.get("title") or condition.get("expression", "without a title"))


def _may_be(member: str, email: str) -> bool:
    return not email or member.partition(":")[2] == email or not member.startswith(ONE_ACCOUNT)
