"""Custom jobs that a client creates in the Vertex AI fake, which go through the states that a test scripts.

A job takes its next state each time that it is asked for, and the clock moves on by the seconds that somebody sleeps:
nothing waits, and results are exact.
"""

from __future__ import annotations

from google.cloud.aiplatform_v1 import types as api

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.custom_jobs import OPEN, CustomJobs, Step, state_of
from vlmpipe.rehearsal.vertex.messages import Call, Json


class ScriptedCustomJobs(CustomJobs):
    """State in memory.

    Attributes:
        scripts: of each job in the order of their creation, its states one request after another; the last one stays.
        stockouts: creations to refuse for want of quota before the next one that passes.
    """

    def __init__(self, parent: str) -> None:
        super().__init__(parent)
        self.scripts: list[list[Step]] = []
        self.stockouts = 0
        self._script_of: dict[str, list[Step]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def create(self, call: Call) -> Json:
        if self.stockouts:
            self.stockouts -= 1
            raise ApiError(429, "The following quota metrics exceed quota limits: custom_model_training_preemptible")
        created = super().create(call)
        self._script_of[created["name"]] = self.scripts.pop(0) if self.scripts else [Step("PENDING")]
        return created

    def asked(self, name: str) -> api.CustomJob:
        job = self.known(name)
        script = self._script_of.get(job.name)
        if script and state_of(job) in OPEN:
            self.move(job, script.pop(0) if len(script) > 1 else script[0])
        return job

    def cancel(self, name: str) -> Json:
        if state_of(self.known(name)) not in OPEN:
            return super().cancel(name)
        self._script_of[name] = [Step("CANCELLED", 1, "CANCELED")]
        return {}
