"""The benchmark job: lmms-eval scores the exported model, which `transformers serve` serves beside it.

lmms-eval runs in an environment of its own (evaluate.lmms_eval.python). Its scores join those of evaluate.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vlmpipe.trainer.config.benchmarks import ANSWERS_FOLDER
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.lmms_eval import IMAGE_PYTHON, LmmsEvalConfig
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, run_main
from vlmpipe.trainer.evaluation.lmms_eval_results import read_results
from vlmpipe.trainer.preflight.machine import require_machine
from vlmpipe.trainer.progress import step_progress
from vlmpipe.trainer.records.evaluation import BenchmarkScores, Evaluation
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.serving.local_server import serving
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines

ANSWER_S = 120  # a question's longest answer, after which lmms-eval gives it up
RESULTS = "results"


def benchmark(job: JobConfig) -> None:
    """Score the run's export by the tasks of evaluate.lmms_eval, and add the scores to evaluate.json.

    Raises UserError: where lmms-eval or its tasks cannot start, where it ends without results, and where a question was
    not answered. evaluate.json is as before then.
    """
    config, run = job.evaluate.lmms_eval, open_storage(job.run.run_uri)
    assert config
    with step_progress(job.run.run_uri, "benchmark") as progress:
        with tempfile.TemporaryDirectory(prefix="vlmpipe-benchmark-") as scratch:
            tasks = Path(scratch)
            copy_tasks(config.include_path, tasks)
            with serving(job.run.run_uri) as server:
                run_lmms_eval(config, server.url, server.model, tasks)
            scored = read_results(tasks / RESULTS, config.tasks)
        for name, task in scored.items():
            if task.answers:
                run.write(f"{ANSWERS_FOLDER}/{name}.jsonl", seal_lines(task.answers))
        evaluation = Evaluation.read(run)
        by_task = {name: BenchmarkScores.model_validate(task.described) for name, task in scored.items()}
        evaluation.model_copy(update={"benchmarks": evaluation.benchmarks | by_task}).write(run)
        scores = [f"{name} {score} {value:.3f}" for name in scored for score, value in by_task[name].scores.items()]
        progress.finish(message=f"lmms-eval: {', '.join(scores)}"[:300])


def require_ready(config: LmmsEvalConfig) -> LmmsEvalConfig:
    """The section with absolute paths of this machine, as a job may run in another folder.

    Raises ConfigError where lmms-eval could not start here, DataError for a folder without tasks.
    """
    if not config.python or not os.access(config.python, os.X_OK):
        raise _no_python(config.python or "no Python", "is no program" if config.python else "is named")
    include_path = config.include_path
    if include_path and "://" not in include_path:
        include_path = str(Path(include_path).absolute())
    task_files(include_path)
    return config.model_copy(update={"python": os.path.abspath(config.python), "include_path": include_path})


def task_files(include_path: str) -> list[str]:
    """Names of the files in evaluate.lmms_eval.include_path. Raises DataError where none is a task."""
    files = [info.name for info in open_storage(include_path).list()] if include_path else []
    if include_path and not any(name.endswith(".yaml") for name in files):
        raise DataError(
            f"evaluate.lmms_eval.include_path: {include_path} holds no task",
            expected="a folder with a task's .yaml file, and its data",
        )
    return files


def copy_tasks(include_path: str, folder: Path) -> None:
    """The files of evaluate.lmms_eval.include_path, as links to files of this machine. Raises DataError for none."""
    for name in task_files(include_path):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(open_storage(include_path).fetch(name).resolve())


def run_lmms_eval(config: LmmsEvalConfig, url: str, model: str, folder: Path) -> None:
    """Ask the model at `url`. lmms-eval also ends with 0 after errors: `read_results` sees them."""
    python = config.python or IMAGE_PYTHON
    options = f"base_url={url},model_version={model},api_key=none,timeout={ANSWER_S},num_concurrent=1"
    command = [python, "-m", "lmms_eval", "--model", "openai", "--model_args", options, "--batch_size", "1"]
    command += ["--tasks", ",".join(config.tasks), "--log_samples", "--output_path", RESULTS]
    command += ["--include_path", str(folder)] if config.include_path else []
    command += ["--limit", str(config.limit)] if config.limit else []
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment | {"OPENAI_API_KEY": "none"}, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise _no_python(python, f"cannot be started: {error.strerror}") from error
    if ended.returncode:
        raise UserError(
            f"lmms-eval ended with exit code {ended.returncode}",
            expected="exit code 0",
            fix="read its own error in the log above",
            code=ExitCode.UNEXPECTED,
        )


def _no_python(python: str, why: str) -> ConfigError:
    return ConfigError(
        f"evaluate.lmms_eval.python: {python} {why}",
        expected="the Python of an environment with lmms-eval",
        fix="make recipe-lmms-eval makes one on this machine; images have one by container/lmms-eval.Dockerfile",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.evaluation.lmms_eval", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    config = parser.parse_args().config
    require_machine(os.environ, run_uri=config.rpartition("/")[0])
    job = JobConfig.load(config)
    use_secrets(job.secrets)
    benchmark(job)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(run_main(main))
