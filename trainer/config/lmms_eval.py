"""The run file's `evaluate.lmms_eval`: tasks of lmms-eval, which score the served export in a job of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from vlmpipe.trainer.config.base import Section, StorageUri

IMAGE_PYTHON = "/opt/lmms-eval/bin/python"  # in the image of container/lmms-eval.Dockerfile
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class LmmsEvalConfig(Section):
    """Scores by lmms-eval, which asks the exported model through `transformers serve`."""

    tasks: tuple[TaskName, ...] = Field(
        min_length=1, description="Tasks by lmms-eval's names; their data is downloaded unless it is there already."
    )
    include_path: StorageUri = Field(
        "",
        description="Folder with task files of your own and their data, local or in a bucket, in a copy of which "
        "lmms-eval runs; empty for none.",
    )
    limit: int = Field(0, ge=0, description="Questions per task, the first ones; 0 is all.")
    image_uri: str = Field(
        "", description="Image with lmms-eval and vlmpipe, container/lmms-eval.Dockerfile. Not used on this machine."
    )
    python: str = Field(
        "", description="Python of lmms-eval's own environment on this machine. Images have one in a fixed place."
    )

    @field_validator("tasks")
    @classmethod
    def _distinct(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := next((name for name in tasks if tasks.count(name) > 1), None):
            raise ValueError(f"found task {repeated} twice, expected tasks that differ")
        return tasks
