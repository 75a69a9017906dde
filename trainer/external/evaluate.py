"""The evaluation job of a run with an evaluation of its own (train.trainer.evaluate_command).

The command reads the result in {model} and the validation samples in {data}, and writes evaluate.json into {output}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys

from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.external_trainer import fill_in
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, run_main
from vlmpipe.trainer.external.launch import setting_values
from vlmpipe.trainer.external.process import Node, environment
from vlmpipe.trainer.external.result import bad_result
from vlmpipe.trainer.launch import one_node
from vlmpipe.trainer.preflight.machine import require_machine
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import FOLDER, require_whole_export

RESULT = Evaluation.FILE


def evaluate(job: JobConfig) -> None:
    """Run the command on one node and take its figures over."""
    trainer, run = job.train.trainer, open_storage(job.run.run_uri)
    assert trainer
    progress = Progress(job.run.run_uri, "evaluate")
    described = require_whole_export(run)
    with export_folder() as scratch:
        folders = {name: scratch / name for name in ("data", "model", "output")}
        for name in ("model", "output"):
            folders[name].mkdir()
        if trainer.data_format != "none":
            export_data(job.pointers().prepared_uri, trainer.data_format, folders["data"])
        else:
            folders["data"].mkdir()
        for name in described["files"]:
            target = folders["model"] / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run.fetch(f"{FOLDER}/{name}"), target)
        paths = {name: str(path) for name, path in folders.items()}
        command = fill_in(trainer.evaluate_command, setting_values(job, 1) | paths)
        variables = {f"VLMPIPE_{name.upper()}": path for name, path in paths.items()}
        node = Node(one_node(), 1)
        try:
            ended = subprocess.run(command, env=environment(trainer, node, variables), check=False)
        except OSError as error:
            raise ConfigError(
                f"train.trainer.evaluate_command: {command[0]} cannot be started: {error.strerror}",
                expected="a program of the image, on this machine one in the folder of train.trainer.python or on PATH",
            ) from error
        if ended.returncode:
            raise UserError(
                f"train.trainer.evaluate_command ended with exit code {ended.returncode}",
                expected="exit code 0",
                fix="read its own error in the log above",
                code=ExitCode.UNEXPECTED,
            )
        try:
            figures = json.loads((folders["output"] / RESULT).read_bytes())
        except (OSError, ValueError) as error:
            raise bad_result(
                f"train.trainer.evaluate_command left no {RESULT} that can be read: {error}",
                expected=f'a JSON object such as {{"exact_match": 0.8, "questions": 300}} in {{output}}/{RESULT}',
            ) from error
        if not isinstance(figures, dict) or not figures:
            raise bad_result(f"{RESULT} of train.trainer.evaluate_command holds no figures", expected="a JSON object")
    try:
        Evaluation.of(figures, f"{{output}}/{RESULT}").write(run)
    except ConfigError as error:
        raise bad_result(
            f"{RESULT} of train.trainer.evaluate_command has no number as {error.found.rpartition(', by ')[2]}",
            expected='figures such as {"exact_match": 0.8, "questions": 300}',
        ) from error
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))
    progress.finish(message=f"evaluated by {trainer.name}'s own command: {shown}"[:300])


def main() -> int:
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.external.evaluate", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    config = parser.parse_args().config
    require_machine(os.environ, run_uri=config.rpartition("/")[0])
    job = JobConfig.load(config)
    use_secrets(job.secrets)
    evaluate(job)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(run_main(main))
