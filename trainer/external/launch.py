"""Launches a training program of the user's own on one node, and returns a meaningful exit code.

python -m vlmpipe.trainer.external.launch --nproc-per-node 2 --config gs://bucket/runs/1/run.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from vlmpipe.trainer import __version__
from vlmpipe.trainer.checkpoint.commit import Checkpoint, Listing, inspect
from vlmpipe.trainer.checkpoint.manifest import signing_key
from vlmpipe.trainer.checkpoint.staging import Staging, program_folder
from vlmpipe.trainer.config.external_trainer import FOLDERS, SETTINGS, WITH_ROLES, ExternalTrainerConfig, fill_in
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.distributed.cluster_env import Roles, read_cluster, read_roles
from vlmpipe.trainer.distributed.rendezvous import meet, rendezvous_timeout_s
from vlmpipe.trainer.errors import ExitCode, run_main
from vlmpipe.trainer.external.base_model import base_model, model_section_sha256
from vlmpipe.trainer.external.checkpoints.gathering import NodeParts
from vlmpipe.trainer.external.checkpoints.resuming import fetch_state, state_folder
from vlmpipe.trainer.external.checkpoints.states import SavedStates, states_of
from vlmpipe.trainer.external.follow import TrainingProgress
from vlmpipe.trainer.external.outcome import judge, steps_wanted
from vlmpipe.trainer.external.platform_folders import CHECKPOINTS, LOGS, ModelFolder, watched_folder
from vlmpipe.trainer.external.process import Node, TrainerProcess, command_line, environment
from vlmpipe.trainer.external.program import program_digest
from vlmpipe.trainer.external.progress_endpoint import ProgressEndpoint, platform_has_one
from vlmpipe.trainer.external.report import TrainerReport, is_done
from vlmpipe.trainer.external.result import model_type_of, require_change, require_result
from vlmpipe.trainer.external.versions import versions_in
from vlmpipe.trainer.launch import one_node, processes_on_node
from vlmpipe.trainer.nesting import object_at
from vlmpipe.trainer.preflight.machine import require_machine
from vlmpipe.trainer.preflight.node import announce, check_node
from vlmpipe.trainer.preflight.reducers import require_reducers
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

POLL_S = 1.0
DIGEST_CHARS = 12  # of a program's, in its run's versions
CHOICE = "trainer/RESUME.json"  # the chief's choice of a checkpoint, for the other nodes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.external.launch", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    parser.add_argument("--nproc-per-node", default="auto", help="processes on this node; auto is one per GPU, or one")
    options = parser.parse_args(arguments)
    machine = require_machine(os.environ, run_uri=options.config.rpartition("/")[0])
    job = JobConfig.load(options.config)
    use_secrets(job.secrets)
    assert job.train.trainer
    node = this_node(job.train.trainer, processes_on_node(options.nproc_per_node))
    print(f"launcher: {node.name}, train.trainer {job.train.trainer.name}", flush=True)
    announce(check_node(job.run.run_uri, node.cluster.node_rank, machine))
    if machine and machine.bought.reducers:
        fails = machine.bought.check == "fail"
        require_reducers(node.cluster.reducers, timeout_s=rendezvous_timeout_s(), fails=fails)
    if is_done(job):
        if node.is_chief:
            TrainerReport.reuse(job)
        return ExitCode.OK
    with program_folder() as scratch:
        return Session(job, job.train.trainer, node, scratch).run()


def this_node(trainer: ExternalTrainerConfig, processes: int) -> Node:
    """This replica's place in the job, from the platform's variables."""
    if trainer.launch not in WITH_ROLES:
        return Node(read_cluster(os.environ) or one_node(), processes)
    alone = one_node()
    roles = read_roles(os.environ) or Roles({"chief": alone.hosts, "worker": (), "ps": (), "evaluator": ()}, "chief", 0)
    return Node(roles.cluster(), 1, roles)


def _versions(trainer: ExternalTrainerConfig) -> dict[str, str]:
    """Return the versions of vlmpipe and of the program's packages, and the start of its files' digest."""
    program = program_digest(trainer)[:DIGEST_CHARS]
    versions = {"vlmpipe": __version__, **versions_in(trainer.python or sys.executable)}
    return {**versions, **({"program": program} if program else {})}


class Session:
    """One start of the program on this node. The chief also keeps its checkpoints, its metrics and its result."""

    def __init__(self, job: JobConfig, trainer: ExternalTrainerConfig, node: Node, scratch: Staging) -> None:
        self._job, self._trainer, self._node, self._lock = job, trainer, node, scratch.lock
        self._scratch = scratch.folder
        self._folders = {name: self._scratch / name for name in FOLDERS}
        for name in ("output", "checkpoints", "resume"):
            self._folders[name].mkdir()
        self._saved_in = [
            self._folders["checkpoints"],
            self._folders["output"],
            *watched_folder(os.environ, CHECKPOINTS),
        ]
        self._logs = watched_folder(os.environ, LOGS)
        self._model = ModelFolder.of(os.environ) if node.is_chief else None
        self._attempt: int | None = None  # None on a replica that does not train
        self._states: SavedStates | None = None
        requested = node.is_chief and not platform_has_one(os.environ)
        self._endpoint = ProgressEndpoint(self._scratch) if requested else None

    def run(self) -> ExitCode:
        """Prepare the inputs, run the program, judge what it leaves."""
        job, trainer, pointers = self._job, self._trainer, self._job.pointers()
        if trainer.data_format != "none":
            counts = export_data(pointers.prepared_uri, trainer.data_format, self._folders["data"]).samples
            print(f"launcher: data as {trainer.data_format}: {counts}", flush=True)
        else:
            self._folders["data"].mkdir()
        base = base_model(job, self._folders["model"])
        record = CommitRecord(
            attempt=0,
            epoch=0,
            step=0,
            sequences_consumed=0,
            world_size=self._node.world_size,
            num_nodes=self._node.cluster.num_nodes if self._node.meets else 1,  # that hold files of checkpoints
            strategy=trainer.name,
            checkpoint_format="trainer",
            plan_sha256=pointers.prepared_uri.rstrip("/").rpartition("/")[2],
            model_sha256=model_section_sha256(job),
            tower_sha256="",
            versions=_versions(trainer),
        )
        checkpoint = self._choose(record)
        resume = str(state_folder(self._folders["resume"], checkpoint)) if checkpoint else ""
        model = resume if resume and trainer.resume_as_model else base
        folders = {**{name: str(path) for name, path in self._folders.items()}, "model": model, "resume": resume}
        with self._endpoint or contextlib.nullcontext():
            return self._run(folders, base, checkpoint, record)

    def _run(
        self, folders: Mapping[str, str], base: str, checkpoint: Checkpoint | None, record: CommitRecord
    ) -> ExitCode:
        if self._node.is_chief:  # before the program runs: the first record is written, or the start fails
            first_step = checkpoint.record.step if checkpoint else 0
            assert self._states
            start, versions = self._states.start, record.versions
            report = TrainerReport(self._job, self._node, start, first_step=first_step, versions=versions)
            lasting = [*self._saved_in[2:], *self._logs]
            progress = TrainingProgress(self._saved_in[:2], self._scratch / METRICS_FILE, first_step, lasting=lasting)
            try:
                with self._start(folders) as process:
                    return self._follow(process, base, progress, report)
            finally:
                self._states.close()
        with self._start(folders) as process:
            parts = NodeParts(
                states_of(self._job.run.run_uri),
                self._attempt,
                self._node.cluster.node_rank,
                self._saved_in,
                key=signing_key(self._job.checkpoint),
            )
            while (code := process.wait(POLL_S)) is None:
                parts.answer()
            process.clean_up()
            parts.close(failed=self._has_failed(process, code))
            nothing = TrainingProgress([], self._scratch / "none")
            done = judge(self._trainer, code, nothing, 0, stopped=process.stopping)
            return ExitCode.OK if done else ExitCode.PREEMPTED

    @staticmethod
    def _has_failed(process: TrainerProcess, code: int) -> bool:
        """Return whether the program's end is that of the job, so that no node waits long for another."""
        return not process.stopping and code not in (ExitCode.OK, ExitCode.PREEMPTED)

    def _choose(self, record: CommitRecord) -> Checkpoint | None:
        """The checkpoint to resume from, which is on this node's disk then; the chief's choice on all nodes, which have
        met then."""
        store, ours = open_storage(self._job.run.run_uri), None
        if self._node.is_chief:
            self._states = SavedStates(self._job, record, self._saved_in)
            ours, origin, passed_over = self._states.resume(self._folders["resume"])
            for reason in passed_over:
                print(f"train: a newer checkpoint is damaged and passed over: {reason}", flush=True)
            self._attempt = self._states.attempt
            name = ours.name if ours else ""
            content = {"attempt": self._attempt, "checkpoint": name, "store": origin.root_uri}
            write_record(store, CHOICE, content)
        if not self._node.meets:
            return ours
        meet(self._node.cluster, timeout_s=rendezvous_timeout_s())
        if self._node.is_chief:
            return ours
        choice = read_record(store, CHOICE)
        self._attempt = choice["attempt"]
        if not (name := choice["checkpoint"]):
            return None
        states = open_storage(choice["store"])
        chosen, _ = inspect(states, name, Listing.read(states), key=signing_key(self._job.checkpoint))
        fetch_state(states, chosen, self._folders["resume"])
        return chosen

    def _start(self, folders: Mapping[str, str]) -> TrainerProcess:
        trainer, node = self._trainer, self._node
        values = {**setting_values(self._job, node.world_size), **folders}
        words = (*trainer.command, *(trainer.resume_args if folders["resume"] else ()))
        command = command_line(trainer, fill_in(words, values), node)
        variables = {
            **{f"VLMPIPE_{name.upper()}": folders[name] for name in FOLDERS},
            "VLMPIPE_METRICS": str(self._scratch / METRICS_FILE),
            "VLMPIPE_RUN_ID": self._job.run.run_id,
            "VLMPIPE_ATTEMPT": "" if self._attempt is None else str(self._attempt),
            **(self._endpoint.variables if self._endpoint else {}),
        }
        print(f"launcher: starting {' '.join(command)}", flush=True)
        values = environment(trainer, node, variables)
        return TrainerProcess(command, values, grace_s=trainer.stop_grace_s, lock=self._lock)

    def _follow(
        self, process: TrainerProcess, base: str, progress: TrainingProgress, report: TrainerReport
    ) -> ExitCode:
        states, trainer = self._states, self._trainer
        assert states
        while (code := process.wait(POLL_S)) is None:
            report.log(progress, self._endpoint.posted if self._endpoint else None)
            states.save_newest()
            report.note(states.take_warnings())
        print(f"launcher: train.trainer {trainer.name} ended with exit code {code}", flush=True)
        if process.clean_up():
            print(f"launcher: processes that train.trainer {trainer.name} left behind were killed", flush=True)
        report.log(progress, last=True)
        states.save_last(lambda: process.stopping, failed=self._has_failed(process, code))
        report.note(states.take_warnings())
        requested = steps_wanted(trainer, self._job.train.max_steps, progress)
        with report.failing():
            if not judge(trainer, code, progress, requested, stopped=process.stopping):
                states.ended("preempted")
                report.stopped(progress, states.newest_step)
                return ExitCode.PREEMPTED
            if self._model:
                self._model.take(self._folders["output"])
            folder = require_result(trainer, self._folders["output"], model_type_of(base))
            require_change(trainer, folder, Path(base))
            name = states.save_result(folder, progress.step, trainer.result)
        states.ended("done")
        report.done(progress, requested, name)
        return ExitCode.OK


def setting_values(job: JobConfig, world_size: int) -> dict[str, str]:
    """The values of the placeholders that are settings of the run file."""
    sections = {name: getattr(job, name).model_dump(mode="json") for name in ("model", "data", "train")}
    values = {}
    for name, field in SETTINGS.items():
        *parents, last = field.split(".")
        value = object_at(sections, *parents)[last] if field else sections
        values[name] = f"{value:g}" if isinstance(value, float) else str(value)
    ranks = world_size * job.train.micro_batch_size
    return values | {"gradient_accumulation_steps": str(max(1, job.train.global_batch_size // ranks))}


if __name__ == "__main__":
    sys.exit(run_main(main))
