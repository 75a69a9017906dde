"""Where a run's fetched images are."""

from __future__ import annotations

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage.base import join_uri

FOLDER = "fetched"  # under the root of all runs


def with_fetched_folder(config: JobConfig) -> JobConfig:
    """The run with a known `data.fetched_folder` where it fetches images."""
    if not config.data.fetch:
        return config
    return config.model_copy(update={"data": config.data.fetching_into(join_uri(config.run.root_uri, FOLDER))})
