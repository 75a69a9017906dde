"""Requests to the Vertex AI stand-in: strict parsing into the API's own messages, routing, paging."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import proto
from google.protobuf import json_format

from vlmpipe.rehearsal.http_server import ApiError

Message = TypeVar("Message", bound=proto.Message)
Json = dict[str, Any]
INVALID = "Invalid JSON payload received."


@dataclass(frozen=True)
class Call:
    """One request to a collection of resources (`number` is empty) or to one of them, with its custom verb."""

    method: str
    parent: str
    collection: str
    number: str
    verb: str
    query: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """The resource's name."""
        return f"{self.parent}/{self.collection}/{self.number}"

    def route(self, routes: Mapping[tuple[str, bool, str], Callable[[], Json]]) -> Json:
        """Answer by the route for (method, whether one resource is named, verb). Raises ApiError (501) without one."""
        if (answer := routes.get((self.method, bool(self.number), self.verb))) is None:
            raise ApiError(501, f"no such route in this fake: {self.method} {self.collection} {self.verb}")
        return answer()

    def parse(self, kind: type[Message]) -> Message:
        """The body as a message. Raises ApiError (400) for unknown fields and values of another type."""
        return parse(kind, self.body)

    def require_fields(self, *known: str) -> Json:
        """The body of a custom verb. Raises ApiError (400) for fields other than `name` and those `known`."""
        content: Json = json.loads(self.body or b"{}")
        if unknown := content.keys() - {"name", *known}:
            raise ApiError(400, f"{INVALID} Unknown name {sorted(unknown)}")
        return content

    def page(self, messages: Sequence[proto.Message], size: int) -> Json:
        """One page of a listing, from the query's pageToken on."""
        start = int(self.query.get("pageToken") or 0)
        answer: Json = {self.collection: [as_dict(message) for message in messages[start : start + size]]}
        if start + size < len(messages):
            answer["nextPageToken"] = str(start + size)
        return answer


def parse(kind: type[Message], body: bytes) -> Message:
    """See `Call.parse`."""
    message = kind()
    try:
        json_format.Parse(body or b"{}", kind.pb(message))
    except json_format.ParseError as error:
        raise ApiError(400, f"{INVALID} {error}") from None
    return message


def as_dict(message: proto.Message) -> Json:
    """The message in the REST API's spelling."""
    return dict(json_format.MessageToDict(type(message).pb(message)))


def fields_of(message: proto.Message) -> set[str]:
    """Names of the fields that are set."""
    return {descriptor.name for descriptor, _ in type(message).pb(message).ListFields()}


def refuse_output_only(message: proto.Message, names: set[str]) -> None:
    """Raise ApiError (400) where a field is set that only the service sets."""
    if output_only := fields_of(message) & names:
        raise ApiError(400, f"output-only fields are set: {sorted(output_only)}")
