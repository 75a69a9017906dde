"""One trial of a search: trains with the trial's values, evaluates, and reports the metric.

    python -m vlmpipe.trainer.trials.tune --config <search>/run.json --metric exact_match --nproc-per-node 2 \
        --train.seed=3

CLOUD_ML_TRIAL_ID names the trial, which is a run of its own in `<search>/trial-<id>/` and resumes from its own
checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from vlmpipe.trainer import launch
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train_fields import ONE_OF_TWO
from vlmpipe.trainer.distributed.cluster_env import read_cluster
from vlmpipe.trainer.errors import ConfigError, run_main
from vlmpipe.trainer.monitoring.hypertune import TRIAL_VARIABLE, VALIDATION_LOSS, WATCHED_VARIABLE
from vlmpipe.trainer.monitoring.hypertune import report as report_to_service
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.metrics import read_metrics
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

CLUSTER_VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")


def main(arguments: list[str] | None = None) -> int:
    """Run the trial on this node. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.trials.tune", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the search's run.json")
    parser.add_argument("--metric", required=True, help="number in evaluate.json, or validation_loss")
    parser.add_argument("--nproc-per-node", default="auto", help="see vlmpipe.trainer.launch")
    options, values = parser.parse_known_args(arguments)
    cluster = read_cluster(os.environ)
    job = open_trial(options.config, parse_values(values), os.environ.get(TRIAL_VARIABLE, ""))
    config = f"{job.run.run_uri}/run.json"
    if options.metric == VALIDATION_LOSS:
        os.environ[WATCHED_VARIABLE] = VALIDATION_LOSS  # training then reports after each validation
    processes = ["--nproc-per-node", options.nproc_per_node, "--"]
    if code := launch.main([*processes, "vlmpipe.trainer.train", "--config", config]):
        return code
    if cluster and cluster.node_rank:
        return 0  # only the chief evaluates
    if options.metric == VALIDATION_LOSS:  # measured in training: needs no export or evaluation
        report(job, options.metric)
        return 0
    from vlmpipe.trainer.checkpoint.sync import sync_run

    sync_run(job)
    for variable in CLUSTER_VARIABLES:
        os.environ.pop(variable, None)
    if code := launch.main([*processes, "vlmpipe.trainer.evaluation.evaluate", "--config", config]):
        return code
    report(job, options.metric)
    return 0


def parse_values(arguments: Sequence[str]) -> dict[str, object]:
    """`["--train.seed=3", ...]` as {dotted name: value}, values as JSON or else text. Raises ConfigError."""
    values: dict[str, object] = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals or not argument.startswith("--"):
            raise ConfigError(f"argument {argument!r}", expected="--name=value, as Vertex AI hands on a trial's values")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def open_trial(config_uri: str, values: dict[str, object], trial: str) -> JobConfig:
    """Write the trial's run.json and prepared.json, the same on every node. Returns the trial's job.

    Raises ConfigError without a trial id and for invalid values.
    """
    if not trial.isalnum():
        raise ConfigError(f"{TRIAL_VARIABLE} is {trial!r}", expected="the trial's id, which Vertex AI sets")
    search = open_storage(config_uri.rpartition("/")[0])
    content = read_record(search, "run.json")
    for name, value in values.items():
        *parents, last = name.split(".")
        inner = content
        for parent in parents:
            inner = inner.get(parent, {})
        if last not in inner:
            raise ConfigError(
                f"there is no field {name} in {search.uri('run.json')}", expected="a field of train or model.lora"
            )
        inner[last] = value
        other = ONE_OF_TWO.get(last, "") if parents == ["train"] else ""
        if other and f"train.{other}" not in values:
            inner[other] = None
    content["run"]["run_id"] = f"{content['run']['run_id']}/trial-{trial}"
    job = JobConfig.model_validate(content)
    folder = open_storage(job.run.run_uri)
    DataPointers.read(search).write(folder)
    write_record(folder, "run.json", content, indent=1)
    return job


def report(job: JobConfig, metric: str) -> float:
    """Report the trial's metric after its last step to the service. Raises ConfigError when it was not measured."""
    store = open_storage(job.run.run_uri)
    if metric == VALIDATION_LOSS:
        measured = {line.step: line.number(metric) for line in read_metrics(store) if metric in line.figures}
        step = max(measured, default=0)
        best = Summary.read(store).best_step if job.checkpoint.export == "best" else None
        score = measured.get(best or step)  # of the step that a run of these settings exports
    else:
        score = Evaluation.read(store).figure(metric)
        step = Summary.read(store).steps or 0
    if not isinstance(score, int | float):
        raise ConfigError(f"the trial has measured no number {metric}", fix="correct tune.metric")
    report_to_service(metric, float(score), int(step))
    print(f"trial: {metric} {score}", flush=True)
    return float(score)


if __name__ == "__main__":
    sys.exit(run_main(main))
