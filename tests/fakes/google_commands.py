"""The commands of gcloud and bq that remedies print, as strict as the tools: words and flags from their references.

What a command changes is done to the stand-in for Google's services.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.google_apis import FakeGoogle

Flags = Mapping[str, str]
LOOKUP = re.compile(r'"\$\((gcloud .*)\)"$')  # a command whose output is an option's value
SWITCHES = {"uniform-bucket-level-access"}  # flags without a value
OF_ALL = {"project", "format"}  # gcloud-wide


@dataclass(frozen=True)
class Command:
    """A command's least and most positional words, its flags, and those that it cannot do without."""

    words: tuple[int, int]
    flags: frozenset[str]
    required: frozenset[str]
    done: Callable[[FakeGoogle, list[str], Flags], object]


def _command(
    words: tuple[int, int], flags: str, required: str, done: Callable[[FakeGoogle, list[str], Flags], object]
) -> Command:
    return Command(words, frozenset(flags.split()) | OF_ALL, frozenset(required.split()), done)


def _bind(resource: Callable[[FakeGoogle, str, Flags], str]) -> Callable[[FakeGoogle, list[str], Flags], object]:
    return lambda google, words, flags: google.bind(resource(google, words[0], flags), flags["role"], flags["member"])


def _project(google: FakeGoogle, name: str, _flags: Flags) -> str:
    assert name == google.project, f"no such project here: {name}"
    return "project"


def _raise_quota(google: FakeGoogle, _words: list[str], flags: Flags) -> None:
    assert flags["service"] == "aiplatform.googleapis.com"
    region = flags["dimensions"].removeprefix("region=")
    google.limits[flags["quota-id"], region] = int(flags["preferred-value"])


def _look_up(google: FakeGoogle, _words: list[str], flags: Flags) -> str:
    """The quota's id, which is its metric here."""
    assert flags["format"] == "value(quotaId)"
    return flags["filter"].removeprefix("metric=")


def _make_repository(google: FakeGoogle, words: list[str], flags: Flags) -> None:
    assert flags["repository-format"] == "docker", "of images"
    google.repositories.add(words[0])


WITHOUT_PROJECT = (
    "gcloud projects add-iam-policy-binding", "gcloud storage buckets add-iam-policy-binding",
    "gcloud auth application-default login", "gcloud auth application-default set-quota-project",
    "bq add-iam-policy-binding",
)  # fmt: skip
BINDING, BOUND = "member role condition", "member role"
COMMANDS: dict[str, Command] = {
    "gcloud services enable": _command((1, 20), "async", "", lambda google, words, _: google.enabled.update(words)),
    "gcloud projects add-iam-policy-binding": _command((1, 1), BINDING, BOUND, _bind(_project)),
    "gcloud iam service-accounts add-iam-policy-binding": _command(
        (1, 1), BINDING, BOUND, _bind(lambda google, name, flags: name)
    ),
    "gcloud storage buckets add-iam-policy-binding": _command(
        (1, 1), BINDING, BOUND, _bind(lambda google, name, flags: name)
    ),
    "gcloud secrets add-iam-policy-binding": _command(
        (1, 1), f"{BINDING} location", BOUND,
        _bind(lambda google, name, flags: f"projects/{flags['project']}/secrets/{name}"),
    ),
    "gcloud artifacts repositories add-iam-policy-binding": _command(
        (1, 1), f"{BINDING} location", f"{BOUND} location", _bind(lambda google, name, flags: name)
    ),
    "bq add-iam-policy-binding": _command(
        (1, 1), "member role table condition", BOUND, _bind(lambda google, name, flags: ".".join(name.rsplit(":", 1)))
    ),
    "gcloud storage buckets create": _command(
        (1, 20), "location uniform-bucket-level-access default-storage-class", "",
        lambda google, words, _: google.buckets.update(word.removeprefix("gs://") for word in words),
    ),
    "gcloud iam service-accounts create": _command(
        (1, 1), "display-name description", "",
        lambda google, words, flags: google.accounts.add(f"{words[0]}@{flags['project']}.iam.gserviceaccount.com"),
    ),
    "gcloud beta quotas preferences create": _command(
        (0, 0), "service preferred-value dimensions quota-id email justification preference-id",
        "service preferred-value quota-id", _raise_quota,
    ),
    "gcloud beta quotas info list": _command((0, 0), "service filter limit", "service", _look_up),
    "gcloud artifacts repositories create": _command(
        (1, 1), "location repository-format description immutable-tags", "location repository-format", _make_repository
    ),
    "gcloud auth application-default set-quota-project": _command(
        (1, 1), "", "", lambda google, words, flags: google.charged.append(words[0])
    ),
    "gcloud auth application-default login": _command(
        (0, 0), "impersonate-service-account no-launch-browser", "", lambda google, words, flags: None
    ),
}  # fmt: skip


def run(google: FakeGoogle, command: str) -> object:
    """Do what a command does. Raises AssertionError for one that the tool, or these tests, would not take."""
    lookup = LOOKUP.search(command)
    found = run(google, lookup[1]) if lookup else ""
    words = shlex.split(LOOKUP.sub(str(found), command) if lookup else command)
    name = next((known for known in COMMANDS if words[: len(known.split())] == known.split()), "")
    assert name, f"no such command in these tests: {command}"
    known, plain, flags = COMMANDS[name], list[str](), dict[str, str]()
    rest = iter(words[len(name.split()) :])
    for word in rest:
        if not word.startswith("--"):
            plain.append(word)
            continue
        flag, _, value = word[2:].partition("=")
        assert flag in known.flags, f"{name} has no flag --{flag}"
        assert flag not in flags, f"--{flag} is given twice"
        flags[flag] = value if "=" in word or flag in SWITCHES else next(rest, "")
        assert flags[flag] or flag in SWITCHES, f"--{flag} has no value"
    least, most = known.words
    assert least <= len(plain) <= most, f"{name} takes {least} to {most} words, not {plain}"
    assert known.required <= flags.keys(), f"{name} needs {sorted(known.required - flags.keys())}"
    assert "project" in flags or name in WITHOUT_PROJECT, f"{name} would take whatever project is set"
    return known.done(google, plain, flags)
