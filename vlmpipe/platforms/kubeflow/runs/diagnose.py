"""`vlmpipe diagnose` for runs on Kubeflow: from the steps' records, the service's errors and the pods' logs.

Sources that may not be read become notes, not errors.
"""

from __future__ import annotations

from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns
from vlmpipe.platforms.kubeflow.runs.logs import PodLogs
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.platforms.kubeflow.runs.status import KubeflowStatus, status_of
from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.runs.diagnosis import Diagnosis, Text, decide, last_lines, rank_ends
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.runs.steps import Step
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.step import step_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri

LAST_LOG_LINES = 1000
LOGS = "vlmpipe logs"


def diagnose_kubeflow(run: KubeflowRun) -> Diagnosis:
    """Diagnose the run. Raises UserError where the service does not return it."""
    runs = KubeflowRuns(run.endpoint, run.namespace)
    result = runs.get(run)
    status = status_of(run, result)
    outcome = status.outcome if status.is_over else "running"
    step = next((step for step in status.state.steps if step.state == outcome), None)
    notes, texts = _notes(status), list[Text]()
    if outcome in ("failed", "stopped"):
        texts = _texts(status, step)
        try:
            lines = PodLogs(run).read(result, step=step.title if step else "", last=LAST_LOG_LINES)
        except UserError as error:
            notes.append(f"the logs could not be read: {error.found}")
        else:
            of_pod = dict[str, list[str]]()
            for line in lines:
                of_pod.setdefault(line.step or line.pod, []).append(line.text)
            texts += [Text(f"{LOGS}, {name}", "\n".join(lines)) for name, lines in of_pod.items()]
    code = status.exit_code
    pattern, hit, also = decide(texts, None if outcome == "stopped" else code) if texts else (None, None, [])
    if code == ExitCode.UNEXPECTED and pattern and hit and not hit.where.startswith(LOGS):
        code = pattern.ends_as or code
    return Diagnosis(
        run=run.name or run.run_id,
        outcome=outcome,
        step=step.title if step else "",
        exit_code=code,
        pattern=pattern,
        hit=hit,
        also=tuple(also),
        ends=tuple(rank_ends(texts)),
        stall=None,
        notes=tuple(notes),
        last_lines=last_lines(texts) if texts and pattern is None else (),
        command=f"submit the run file again with --target kubeflow --run-id {status.state.run_id}",
    )


def _texts(status: KubeflowStatus, step: Step | None) -> list[Text]:
    """Error messages of the run's end, the most informative first."""
    texts = []
    if step and step.detail.get("error"):
        texts.append(Text(step_file(step.name), str(step.detail["error"]), first_line=0))
    if status.outcome == "stopped":
        texts.append(Text("the run", f"run {status.run.argument} was cancelled. {status.error}", first_line=0))
    texts.append(Text("the run", status.error, first_line=0))
    return [text for text in texts if text.text.strip()]


def _notes(status: KubeflowStatus) -> list[str]:
    """Saved checkpoint, and the run's page."""
    notes = []
    uri, stage = status.run.run_uri, status.state.stage
    if uri and not status.files.unreadable and status.outcome in ("failed", "stopped"):
        is_last = stage == status.state.stages[-1]
        step = newest_checkpoint_step(open_storage(uri if is_last else join_uri(uri, STAGES_FOLDER, stage)))
        if step is not None:
            notes.append(f"a checkpoint at step {step} is saved, from which a resumed run continues")
    if status.files.unreadable:
        notes.append(f"the run's records are missing, because {status.files.unreadable}")
    return [*notes, f"its page: {status.run.link}"]
