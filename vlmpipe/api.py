"""The Python API: load, check, plan and compile a run file, run it here or submit it, and read the status of a run.

    import vlmpipe

    config = vlmpipe.load("configs/digits.yaml", "train.epochs=2")
    run = vlmpipe.run(config)  # or vlmpipe.run("configs/digits.yaml")
    print(run.report)

Where a function takes a `config`, it takes the path of a run file as well. In a notebook a plan, a comparison and a run
show themselves. The command line is built on these functions. Importing this module is fast: each function imports what
it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.errors import ExitCode, UserError, missing_packages, require_package

if TYPE_CHECKING:
    from vlmpipe.comparison.compare import Comparison
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.doctor.rows import Row
    from vlmpipe.pipelines.checks.finding import Finding
    from vlmpipe.planner.plan import Plan
    from vlmpipe.planner.stages import StagesPlan
    from vlmpipe.planner.sweep import SweepPlan
    from vlmpipe.platforms.base import Status, Submitted
    from vlmpipe.platforms.compiled import Compiled
    from vlmpipe.runs.folders.summary import RunReport
    from vlmpipe.runs.live_view import View
    from vlmpipe.trainer.evaluation.prediction.answer_file import Answer

PLAN_IS_RED = "Warning: by its plan this run cannot end well on this machine: {} (vlmpipe plan --target local)"


class RunFailedError(UserError):
    """A run on this machine failed or was stopped. `run` has its records; the exit code is the failing step's."""

    def __init__(self, run: RunReport) -> None:
        self.run = run
        super().__init__("\n".join(run.lines()), code=run.exit_code or ExitCode.UNEXPECTED)


@missing_packages()
def load(path: str | Path, *overrides: str) -> RunConfig:
    """Read and check a run file.

    Args:
        path: The run file, for example "configs/digits.yaml".
        overrides: Fields to replace, as on the command line: "train.epochs=2".

    Raises:
        RunFileError: Lists every problem, each with its field, what was found and what was expected.
    """
    from vlmpipe.config.run_config import load_new_run

    return load_new_run(path, overrides)


def _loaded(config: RunConfig | str | Path) -> RunConfig:
    return load(config) if isinstance(config, str | Path) else config


@missing_packages()
def check(config: RunConfig | str | Path) -> list[Finding]:
    """Check model, data, batch, output and job specs, in seconds and offline; `doctor` is the online half.

    A finding's `state` is "ok", "warning", "failed" or "unchecked".
    """
    from vlmpipe.pipelines.check import check_run

    return check_run(_loaded(config))


@missing_packages()
def doctor(config: RunConfig | str | Path) -> list[Row]:
    """Ask Google Cloud and the hub for what the run file names: APIs, quotas, images, accounts, permissions, addresses.

    A row's `state` is "ok", "missing" or "cannot see"; its `fix` has the commands that mend it. Changes nothing.
    """
    from vlmpipe.doctor.doctor import examine

    return examine(_loaded(config))


@missing_packages()
def plan(config: RunConfig | str | Path, target: str = DEFAULT) -> Plan | StagesPlan | SweepPlan:
    """Return whether a run fits in memory, how long it takes and what it costs. `Plan.state` is "green", "amber" or
    "red".

    A run file with stages has a StagesPlan: the plan of each, and the sums; one with a sweep a SweepPlan, of variants.

    Reads prepared data's index where there is one; downloads no weights. The target local is this machine: its cores,
    the memory that is free now, its GPUs; `Plan.cost` is None.
    """
    from vlmpipe.catalog.this_machine import this_machine
    from vlmpipe.planner.sweep import plan_config

    return plan_config(_loaded(config), here=this_machine() if platform_of(target).is_here else None)


@missing_packages()
def compile(config: RunConfig | str | Path, target: str = DEFAULT, output: str | Path | None = None) -> Compiled:
    """Compile the pipeline of a run file to YAML.

    Args:
        output: File to write; build/pipelines/<name>.<target>.yaml by default.

    Raises:
        ConfigError: The run file lacks what the target needs, or Vertex AI would refuse one of its jobs.
    """
    from vlmpipe.pipelines.compile import compile_pipeline
    from vlmpipe.platforms.compiled import FOLDER

    config = _loaded(config)
    return compile_pipeline(config, target, Path(output or FOLDER / f"{config.name}.{target}.yaml"))


@missing_packages()
def run(
    config: RunConfig | str | Path,
    *,
    run_id: str = "",
    fresh: bool = False,
    retries: int | None = None,
    inject_faults: Sequence[str] = (),
    view: View | None = None,
    say: Callable[[str], None] = print,
    raise_on_failure: bool = True,
) -> RunReport:
    """Run the whole pipeline on this machine and wait for it.

    The last unfinished run that would train the same weights is resumed; a run that is named takes every setting that
    its checkpoints allow (docs/reference/resuming.md), also a finished one.

    In the main thread, SIGINT and SIGTERM stop the run and save its progress. In another thread no signal reaches it:
    `vlmpipe cancel RUN` stops it, and the end of the thread or of this process.

    Args:
        run_id: Name of the run, or of one to continue: @last is this run file's newest, @last:NAME another's.
            <name>-<date>-<time> by default.
        fresh: Start a new run where one could be resumed.
        retries: Restarts of each replica of a job that fails without a named cause; 0 by default, with `inject_faults`
            as many as on Vertex AI.
        inject_faults: Faults of the training job, such as "kill:rank=0,after_step=7".
        view: Where progress is shown; lines of text by default.
        say: Prints the first lines, and those of the default view.
        raise_on_failure: Raise RunFailedError for a run that fails; otherwise its report is returned as well.

    Raises:
        ConfigError: The run cannot be started, for example because the checkpoints of the run `run_id` cannot be
            continued with these settings, or no model can be built from the model section.
        RunFailedError: The run failed or was stopped.
    """
    from vlmpipe.pipelines.checks.packages_look import require_here
    from vlmpipe.planner.sweep import require_runnable
    from vlmpipe.platforms.local.jobs.gpus import missing_gpus
    from vlmpipe.platforms.local.process import execute, pipeline_command
    from vlmpipe.platforms.short_names import run_to_continue
    from vlmpipe.runs.folders.choice import open_run
    from vlmpipe.runs.folders.run import require_runs_folder
    from vlmpipe.runs.folders.summary import report_of
    from vlmpipe.runs.live_view import view_for

    config = _loaded(config)
    run_id = run_to_continue(run_id, config)
    require_package("kfp")  # which runs the pipeline, in a process of its own
    require_here(config)
    require_runs_folder(config)  # before the plan, which takes seconds
    if inject_faults:
        from vlmpipe.platforms.local.jobs.fault_spec import parse_faults

        cluster = config.cluster
        parse_faults(inject_faults, nodes=cluster.replica_count, ranks_per_node=cluster.processes)
    errors = require_runnable(config)
    this = open_run(config, config.source, run_id=run_id, fresh=fresh, say=say)
    try:
        for line in filter(None, (*this.introduction(), missing_gpus(config), *map(PLAN_IS_RED.format, errors))):
            say(line)
        view = view or view_for(plain=True, say=say)
        execute(this, view, pipeline_command(this, retries=retries, faults=inject_faults))
    finally:
        this.release()
    report = report_of(this.folder, this.marker)
    if raise_on_failure and report.exit_code:
        raise RunFailedError(report)
    return report


@missing_packages()
def submit(
    config: RunConfig | str | Path, *, run_id: str = "", force: bool = False, yes: bool = False, dry_run: bool = False
) -> Submitted:
    """Plan and compile a run and start it on Vertex AI. A run above plan.confirm_above_usd needs
    `yes`, since this function asks no question.

    Args:
        run_id: An earlier run on Vertex AI to resume, also @last of this run file or @last:NAME; a new one by default.
        force: Submit although the plan is red, and without checking buckets.
        yes: Submit whatever it costs.
        dry_run: Do everything but send.

    Raises:
        UserError: The run was not started, or the error says that this is not known.
    """
    from vlmpipe.pipelines.submit import submit_run
    from vlmpipe.platforms.short_names import submitted_to_continue
    from vlmpipe.platforms.table import DEFAULT

    config = _loaded(config)
    run_id = submitted_to_continue(run_id, config, DEFAULT)
    return submit_run(config, source=config.source, run_id=run_id, force=force, yes=yes, dry_run=dry_run, ask=None)


@missing_packages()
def status(name: str, *, root: str = "runs", project: str = "", location: str = "") -> Status:
    """The status of a run or a search.

    Args:
        name: Run id or folder, pipeline job, its resource name or its link to the console or to Kubeflow's page; or a
            search.
        root: output.root_uri of the runs on this machine.
        project: Google Cloud project of a run on Vertex AI that was not submitted from this folder.
        location: Its region.

    Raises:
        ConfigError: There is no such run.
    """
    from vlmpipe.platforms.find import reader_of

    read, _ = reader_of(name, root=root, project=project, location=location)
    return read()


@missing_packages()
def predict(run: str, images: str | Path, question: str = "", *, root: str = "runs", batch: int = 0) -> list[Answer]:
    """Answer questions with a run's model, asked as its evaluation asks.

    Args:
        run: Run id or a short name such as "@last", folder, gs:// address, MODEL@ALIAS or MODEL@VERSION.
        images: An image, a folder of images, a table (.jsonl, .csv, .parquet) with image or file_name and question, or
            a source as data.source takes it.
        question: What to ask about each image that has no question of its own.
        root: output.root_uri of the runs on this machine.
        batch: Questions at once; 0 takes the run's evaluate.batch_questions.

    Returns:
        The answers in the order of the images. One that cannot be asked about has an error instead.

    Raises:
        UserError: There is no such run, its export is damaged, or none of the images can be asked about.
    """
    from vlmpipe.comparison.sides import run_uri_named
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.evaluation.prediction.predict import Predictor
    from vlmpipe.trainer.evaluation.prediction.questions import read_questions
    from vlmpipe.trainer.storage.base import join_uri

    job = JobConfig.load(join_uri(run_uri_named(run, root), "run.json"))
    questions = read_questions(images, question, job.data)
    predictor = Predictor.load(job)
    return [answer for answers in predictor.answer(questions, batch=batch) for answer in answers]


@missing_packages()
def compare(*runs: str, root: str = "runs") -> Comparison:
    """Compare evaluated runs with the first of them, on the questions that all were asked.

    Args:
        runs: Two or more, named as for `predict`.
        root: output.root_uri of the runs on this machine.

    Raises:
        UserError: There is no such run, one has no evaluation, or they share no question.
    """
    from vlmpipe.comparison.compare import compare as compared
    from vlmpipe.comparison.sides import read_sides

    return compared(read_sides(runs, root))
