"""This machine, as the rest of the program asks a platform."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.platforms.base import Platform
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.run_settings import RunSettings
    from vlmpipe.job_spec.order import JobOrder
    from vlmpipe.platforms.local.graph import LocalGraph
    from vlmpipe.platforms.local.run import RunHere
    from vlmpipe.records.registered import Registered
    from vlmpipe.runs.folders.search import LocalSearch
    from vlmpipe.serving.agreement import Agreement
    from vlmpipe.serving.questions import ValidationQuestion


class Local(Platform):
    """The graph and its jobs as processes, which `vlmpipe run` starts and waits for."""

    name, title = "local", "this machine"
    is_here = True

    def check(self, config: RunConfig) -> None:
        """This machine needs no settings."""

    def check_files(self, config: RunConfig) -> None:
        """Jobs here read this machine's files."""

    def root_uri(self, config: RunConfig) -> str:
        return config.output.root_uri

    def graph(self) -> LocalGraph:
        from vlmpipe.platforms.local.graph import LocalGraph

        return LocalGraph()

    def run_job(self, order: JobOrder) -> str:
        with collector_off():  # it loads the clients of Vertex AI, with the message of a job
            from vlmpipe.platforms.local.jobs.job import run_job

        return run_job(order.display_name, order.spec(), labels=order.labels, project=order.project)

    def deploy(
        self, run_uri: str, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        from vlmpipe.config.serving_container import require_deploy
        from vlmpipe.serving.agreement import measure_agreement, require_agreement
        from vlmpipe.serving.openai import CHAT_PATH, ChatServer
        from vlmpipe.trainer.serving.local_server import serving

        deploy = require_deploy(run)
        with serving(run_uri, quantized=deploy.quantized or "") as server:
            result = measure_agreement(questions, ChatServer(f"{server.url}{CHAT_PATH}", server.model).ask)
            require_agreement(result, deploy.min_agreement)
        return result, {"server": "transformers serve"}

    def find(self, name: str, *, root: str, project: str, location: str) -> RunHere | None:
        from vlmpipe.platforms.local.run import RunHere
        from vlmpipe.runs.folders.marker import MARKER
        from vlmpipe.runs.folders.summary import find_run

        if not any(Path(folder, MARKER).is_file() for folder in (name, join_uri(root, "runs", name))):
            return None
        return RunHere(find_run(root, name).folder)

    def run_in(self, folder: Path) -> RunHere:
        from vlmpipe.platforms.local.run import RunHere

        return RunHere(folder)

    def find_search(self, name: str, root: str) -> LocalSearch | None:
        from vlmpipe.runs.folders.search import search_here

        return search_here(name, root)
