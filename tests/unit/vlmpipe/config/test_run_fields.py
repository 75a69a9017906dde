"""The schema of the run file extends that of its jobs."""

from __future__ import annotations

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.run_fields import RunFields
from vlmpipe.trainer.config.job import JobConfig, JobSections


def test_a_section_that_jobs_read_is_declared_once() -> None:
    stricter = {"name", "data"}  # a run file's name is that of files and services, and its sources are known ones
    assert RunFields.__annotations__.keys() & JobSections.model_fields.keys() == stricter
    assert JobConfig.__annotations__.keys().isdisjoint(JobSections.model_fields)
    shared = JobSections.model_fields.keys() - stricter
    assert {
        name for name in shared if RunConfig.model_fields[name].annotation != JobConfig.model_fields[name].annotation
    } == set()
