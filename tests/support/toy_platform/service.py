"""The toy's service: JSON files in one folder, and the run, job and search that commands find there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpipe.planner.spending.approval import Approved
from vlmpipe.platforms.base import LogLine, SearchOrder, SentJob
from vlmpipe.runs.diagnosis import Diagnosis, Text, decide
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.searches import SearchStatus
from vlmpipe.runs.steps import Step

TITLE = "the toy service"
ENDED = {"done": 0, "failed": 65, "stopped": 75}  # exit codes by state


def write(file: Path, **content: object) -> None:
    file.write_text(json.dumps(content))


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@dataclass(frozen=True)
class ToyStatus:
    name: str
    word: str
    decision = None

    @property
    def state(self) -> RunState:
        return RunState(self.name, (Step("train", self.word),))

    @property
    def is_over(self) -> bool:
        return self.word in ENDED

    @property
    def exit_code(self) -> int | None:
        return ENDED.get(self.word)

    def lines(self) -> list[str]:
        return [f"toy run {self.name}: {self.word}"]

    def as_json(self) -> dict[str, object]:
        return {"run": self.name, "outcome": self.word}


@dataclass(frozen=True)
class ToyRun:
    """A run, or a job without a pipeline."""

    file: Path
    asks = asks_for_logs = TITLE

    @property
    def argument(self) -> str:
        return self.file.stem

    def reader(self) -> Callable[[], ToyStatus]:
        return lambda: ToyStatus(self.argument, read(self.file)["state"])

    def logs(self, *, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        for text in read(self.file)["log"][-last:]:
            yield LogLine(f"train: {text}", "", "train", "rank-0", text)

    def cancel(self) -> bool:
        write(self.file, **{**read(self.file), "state": "stopped"})
        return True

    def diagnose(self) -> Diagnosis:
        content = read(self.file)
        code = ENDED.get(content["state"])
        texts = [Text("the toy's log", "\n".join(content["log"]))]
        pattern, hit, also = decide(texts, code)
        return Diagnosis(
            self.argument, content["state"], "train", code, pattern, hit, tuple(also), (), None, (), (), "submit again"
        )


@dataclass(frozen=True)
class ToyJobs:
    folder: Path
    place: str

    @property
    def endpoint(self) -> str:
        return f"toy://{self.place}"

    def connect(self) -> None:
        """The folder is always there."""

    def request(
        self, spec: object, *, display_name: str, labels: dict[str, str], encryption_key: str = ""
    ) -> ToyJobRequest:
        return ToyJobRequest(self.folder / f"{display_name}-job.json", labels)


@dataclass(frozen=True)
class ToyJobRequest:
    file: Path
    labels: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        return {"job": self.file.stem, "labels": self.labels}

    def send(self, approved: Approved) -> SentJob:
        write(self.file, state="running", log=[])
        return SentJob(f"toy://jobs/{self.file.stem}", self.file.stem, "toy://console", ToyRun(self.file))


@dataclass(frozen=True)
class ToySearchRequest:
    file: Path
    order: SearchOrder

    def as_dict(self) -> dict[str, object]:
        return {"search": self.order.search_id, "pools": len(self.order.trial["worker_pool_specs"])}

    def send(self, approved: Approved) -> str:
        write(self.file, state="running", trials=self.order.tune.max_trial_count)
        return f"toy://searches/{self.order.search_id}"


@dataclass(frozen=True)
class ToySearch:
    file: Path
    asks = TITLE

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(".search.json")

    def status(self) -> SearchStatus:
        content = read(self.file)
        return SearchStatus(self.name, "", content["state"], "exact_match", "MAXIMIZE", content["trials"], ())

    def cancel(self) -> bool:
        write(self.file, **{**read(self.file), "state": "stopped"})
        return True
