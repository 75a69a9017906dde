"""vlmpipe's KFP components, for pipelines of your own.

    from vlmpipe.kfp_components import open_run, prepare_data

A pipeline begins with `open_run`, which checks a run file and returns the run's folder; the other components take that
folder. They run on the image that the environment variable VLMPIPE_PIPELINE_IMAGE names when this module is imported
(docs/how-to/images.md); kfp's `set_container_image` gives a single task another one.
"""

from __future__ import annotations

import os

from vlmpipe.trainer.errors import missing_packages

with missing_packages():
    from vlmpipe.components.decide import decide as _decide
    from vlmpipe.components.jobs.collect_features import collect_features as _collect_features
    from vlmpipe.components.jobs.run_job import run_job as _run_job
    from vlmpipe.components.notify import notify as _notify
    from vlmpipe.components.open_run import open_run as _open_run
    from vlmpipe.components.prepare_data import prepare_data as _prepare_data
    from vlmpipe.components.register_model import register_model as _register_model
    from vlmpipe.components.sync_checkpoint import sync_checkpoint as _sync_checkpoint
    from vlmpipe.platforms.graph import component_of

IMAGE_VARIABLE = "VLMPIPE_PIPELINE_IMAGE"
# Without an image of one's own a step fails at its pull: no registry can have a name under .invalid (RFC 2606).
_IMAGE = os.environ.get(IMAGE_VARIABLE, "vlmpipe.invalid/pipeline:latest")

open_run = component_of(_open_run, _IMAGE)
prepare_data = component_of(_prepare_data, _IMAGE)
run_job = component_of(_run_job, _IMAGE)
collect_features = component_of(_collect_features, _IMAGE)
sync_checkpoint = component_of(_sync_checkpoint, _IMAGE)
decide = component_of(_decide, _IMAGE)
register_model = component_of(_register_model, _IMAGE)
notify = component_of(_notify, _IMAGE)

__all__ = [
    "collect_features",
    "decide",
    "notify",
    "open_run",
    "prepare_data",
    "register_model",
    "run_job",
    "sync_checkpoint",
]
