"""Models with adapters, built as a run builds them."""

from __future__ import annotations

from torch import nn

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage


def built_model(job: JobConfig) -> nn.Module:
    """What training starts with."""
    return family_of(job.model).build(job.model, load_tokenizer(open_storage(job.pointers().prepared_uri)))
