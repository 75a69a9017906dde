"""Labels by which Vertex AI assigns the costs of a pipeline's jobs to its run.

The service passes them to each step in VERTEX_AI_PIPELINES_RUN_LABELS, and the launcher of Google's own components adds
them to the jobs that it creates (gcp_launcher/utils/gcp_labels_util.py). Jobs of our own steps must do so, too: without
them a run's GPUs are missing from the run's cost in the console and from billing exports by run.
"""

from __future__ import annotations

import json
import os
import re

RUN_LABELS_VARIABLE = "VERTEX_AI_PIPELINES_RUN_LABELS"
MAX_LABEL_CHARS = 64  # of key and of value, in Unicode code points (CustomJob.labels, v1)
_LABEL = re.compile(rf"[\w-]{{0,{MAX_LABEL_CHARS}}}")


def run_labels() -> dict[str, str]:
    """The labels of the pipeline run that this step belongs to; none outside one.

    Labels that the service would refuse in a job are left out and printed: they must not keep a job from starting.
    """
    text = os.environ.get(RUN_LABELS_VARIABLE, "")
    if not text:
        return {}
    try:
        result = json.loads(text)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        print(f"note: {RUN_LABELS_VARIABLE} is no JSON object, so the run's cost lacks this step's jobs", flush=True)
        return {}
    labels = {key: value for key, value in result.items() if key and _is_label(key) and _is_label(value)}
    if left_out := sorted(result.keys() - labels.keys()):
        names = ", ".join(map(repr, left_out))
        print(f"note: labels of {RUN_LABELS_VARIABLE} that are no labels are left out: {names}", flush=True)
    return labels


def _is_label(text: object) -> bool:
    return isinstance(text, str) and bool(_LABEL.fullmatch(text)) and text == text.lower()
