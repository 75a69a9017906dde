"""Forms of the names that Vertex AI is sent, from the comments of its API (google.cloud.aiplatform_v1, SDK 1.165.1) and
Google Cloud's pages on projects, labels and locations.

The run file, `check`, compiling, submitting and the rehearsal's server ask this one table. A form is of the whole text:
a final newline is no part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LABEL_CHARS = 63
LABELS_OF_A_RESOURCE = 64
RESERVED_LABELS = ("goog-", "aiplatform.googleapis.com/")  # the services set these themselves
_SEGMENT = r"[A-Za-z0-9_.:-]+"
_DIRECTION = r"(?:north|south|east|west|central|northeast|northwest|southeast|southwest)"


@dataclass(frozen=True)
class Form:
    """The form of a name. `expected` is for people; a group `region` is where the named thing lies."""

    pattern: str
    expected: str

    def fits(self, text: str) -> bool:
        return bool(re.fullmatch(self.pattern, text))

    def region_of(self, text: str) -> str:
        """The region in a name that fits."""
        match = re.fullmatch(self.pattern, text)
        return match["region"] if match else ""

    def required(self, text: str) -> str:
        """The text, which may be empty. Raises ValueError for one that does not fit."""
        if text and not self.fits(text):
            raise ValueError(f"expected {self.expected}")
        return text


PROJECT = Form(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", "a project id such as my-project")
REGION = Form(
    rf"(africa|asia|australia|europe|me|northamerica|southamerica|us)-{_DIRECTION}[0-9]{{1,2}}",
    "a region such as us-central1 or europe-west4",
)
SERVICE_ACCOUNT = Form(
    r"[a-z0-9-]+@[a-z0-9.:-]+\.gserviceaccount\.com",
    "a service account such as trainer@my-project.iam.gserviceaccount.com",
)
NETWORK = Form(
    r"projects/[0-9]+/global/networks/[a-z]([a-z0-9-]*[a-z0-9])?",
    "projects/NUMBER/global/networks/NAME with the project's number",
)
TENSORBOARD = Form(
    rf"projects/{_SEGMENT}/locations/(?P<region>{_SEGMENT})/tensorboards/{_SEGMENT}",
    "projects/NUMBER/locations/REGION/tensorboards/ID, which gcloud ai tensorboards list --region REGION prints",
)
ENCRYPTION_KEY = Form(
    rf"projects/{_SEGMENT}/locations/(?P<region>{_SEGMENT})/keyRings/{_SEGMENT}/cryptoKeys/{_SEGMENT}",
    "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY",
)
PERSISTENT_RESOURCE = Form(r"[a-z]([a-z0-9-]{0,126}[a-z0-9])?", "its id: lower-case letters, digits and dashes")
BUCKET_PREFIX = Form(r"gs://[a-z0-9][a-z0-9._-]+(/.*)?", "gs://bucket/folder")
IMAGE = Form(
    r"[a-z0-9.-]+\.[a-z]{2,}(:[0-9]+)?/[a-z0-9._/-]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]{1,128})",
    "an image such as <location>-docker.pkg.dev/...@sha256:...",
)
PULLABLE_IMAGE = Form(
    r"[a-z0-9.-]+(:[0-9]+)?/[a-z0-9._/-]+(:[A-Za-z0-9._-]{1,128})?(@sha256:[0-9a-f]{64})?",
    "an image that the cluster can pull, best by digest",
)
LABEL_KEY = Form(rf"[a-z][a-z0-9_-]{{0,{LABEL_CHARS - 1}}}", "a label's name")
LABEL_VALUE = Form(rf"[a-z0-9_-]{{0,{LABEL_CHARS}}}", "a label's value")


def unreserved(key: str) -> str:
    """A label's key. Raises ValueError for one that only Google's services set."""
    if key.startswith(RESERVED_LABELS):
        raise ValueError(f"found {key}: Google Cloud keeps names that begin with {RESERVED_LABELS[0]} for itself")
    return key
