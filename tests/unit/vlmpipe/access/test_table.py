"""Every field of the run file that names a bucket, a secret, an image or an account is in the table of accesses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.support import access_pages
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.golden_pipelines import RUN_FILES, graph
from vlmpipe.access.grants import secret_readers
from vlmpipe.access.needs import named
from vlmpipe.access.table import FieldRow, Table, load_table
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.worker_pools import STEP_LABEL

SHIPPED = ("configs", "configs/sweeps", "tests/fixtures/run_files")
IN_SWEEPS = ("cache-features", "train-variants")  # there, steps of ours start the jobs
NOT_IN_A_SHIPPED_GRAPH = {
    "submit", "start-jobs", "trial", "probe",  # no steps of a graph
    "plan-data", "prepare-chunks",  # with data.tasks
    "benchmark", "deploy-model", "mail",
}  # fmt: skip
# What names a resource of Google Cloud. A field that takes one of these opens it, or is one of FREE_TEXTS.
PROBES = {
    "bucket": "gs://a-bucket/a-folder/a-file",
    "table": "bq://a-project.a_dataset.a_table",
    "secret": "projects/a-project/secrets/a-secret/versions/1",
    "image": "us-docker.pkg.dev/a-project/a-repository/an-image@sha256:" + "0" * 64,
    "account": "an-account@a-project.iam.gserviceaccount.com",
    "tensorboard": "projects/1/locations/us-central1/tensorboards/1",
    "key": "projects/a-project/locations/us-central1/keyRings/a-ring/cryptoKeys/a-key",
}
# Fields that take any text, and name nothing of Google Cloud that a step opens. Whoever adds one here says so by it.
_FREE_TEXTS = """
checkpoint.signing_key_file cluster.env.* cluster.machine_type cluster.evaluate_machine.machine_type
cluster.features_machine.machine_type cluster.reservation_affinity.key cluster.reservation_affinity.values.[]
cluster.evaluate_machine.reservation_affinity.key cluster.evaluate_machine.reservation_affinity.values.[]
cluster.features_machine.reservation_affinity.key cluster.features_machine.reservation_affinity.values.[]
cluster.lustre_mounts.[].filesystem cluster.lustre_mounts.[].instance_ip cluster.lustre_mounts.[].mount_point
cluster.lustre_mounts.[].volume_handle cluster.nfs_mounts.[].mount_point cluster.nfs_mounts.[].path
cluster.nfs_mounts.[].server
data.columns.image.[] data.columns.question data.columns.answer data.columns.messages data.columns.id
data.columns.split data.columns.weight data.columns.ignored.[] data.sources.[].columns.image.[]
data.sources.[].columns.question data.sources.[].columns.answer data.sources.[].columns.messages
data.sources.[].columns.id data.sources.[].columns.split data.sources.[].columns.weight
data.sources.[].columns.ignored.[]
data.allowed_tokens.[] data.answer_end data.caption_question data.sources.[].caption_question
data.slices.[] data.sources.[].license data.sources.[].replay_prompts.[]
data.split_by deploy.accelerator_type deploy.args.[] deploy.env.*
deploy.machine_type
evaluate.benchmarks.[].prompt evaluate.lmms_eval.python evaluate.retention.prompts.[]
gcp.labels.* gcp.persistent_resource_id gcp.project
gcp.psc_interface_config.dns_peering_configs.[].domain
gcp.psc_interface_config.dns_peering_configs.[].target_network
gcp.psc_interface_config.dns_peering_configs.[].target_project gcp.reserved_ip_ranges.[] kubeflow.endpoint
kubeflow.experiment model.freeze_parameters.[] model.language_model.revision model.lora.targets.[]
model.lora.train_tokens.[] model.pretrained.revision model.projector.revision model.relevance.channels.[]
model.tokenizer_revision
model.tower.revision
model.train_parameters.[] notify.email.[] plan.prices_file register.hub.revision register.serving.args.[]
register.serving.command.[] register.serving.env.* train.mlflow.experiment train.mlflow.tracking_uri
train.trainer.command.[] train.trainer.evaluate_command.[] train.trainer.python train.trainer.resume_args.[]
train.trainer.roles.ps_machine_type train.wandb.entity train.wandb.project
"""
FREE_TEXTS = frozenset(_FREE_TEXTS.split())


def leaves(annotation: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each text field of a section, with its type: a list's elements as [], a map's values as *."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            inner = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            yield from leaves(inner, ".".join(filter(None, [path, field.alias or name])))
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if arguments[0] is str:
            yield path, annotation
        else:
            yield from leaves(arguments[0], path)
    elif origin in (list, tuple):
        yield from leaves(arguments[0], f"{path}.[]")
    elif origin is dict:
        yield from leaves(arguments[1], f"{path}.*")
    elif annotation is str:
        yield path, annotation
    elif origin is Union or str(origin) == "<class 'types.UnionType'>":
        for one in arguments:
            yield from leaves(one, path)


def takes(annotation: Any, value: str) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def fields() -> dict[str, list[Any]]:
    """Text fields by path, but for those of stages and variants, which are the run file's own."""
    found: dict[str, list[Any]] = {}
    for path, annotation in leaves(RunConfig):
        if not path.startswith(("stages.", "sweep.", "tune.")):
            found.setdefault(path, []).append(annotation)
    return found


@functools.cache
def fields_that_take_a_resource() -> tuple[str, ...]:
    """Those that take one of PROBES, whether they mean it or take any text."""
    return tuple(
        path
        for path, annotations in fields().items()
        if any(takes(annotation, probe) for annotation in annotations for probe in PROBES.values())
    )


def without_a_row(table: Table) -> list[str]:
    rows = {name for row in table.fields for name in row.names}
    return [path for path in fields_that_take_a_resource() if path not in rows and path not in FREE_TEXTS]


def test_every_field_that_names_a_resource_has_a_row() -> None:
    assert without_a_row(load_table()) == []


def test_a_field_without_a_row_is_noticed() -> None:
    table = load_table()
    for row in table.fields:
        rest = table.model_copy(update={"fields": tuple(one for one in table.fields if one is not row)})
        assert set(without_a_row(rest)) == set(row.names) & fields().keys() != set()


def test_rows_and_free_texts_are_fields_of_the_run_file_that_take_what_they_say() -> None:
    known = fields()
    assert {name for row in load_table().fields for name in row.names} <= known.keys()
    assert known.keys() >= FREE_TEXTS
    for row in load_table().fields:
        for kind in set(row.kinds) & PROBES.keys():
            assert any(takes(one, PROBES[kind]) for name in row.names for one in known[name]), (row.names, kind)


def test_a_field_of_a_new_section_is_noticed() -> None:
    class NewSection(BaseModel):
        anything: str = ""
        nested: tuple[dict[str, Annotated[str, "a mark"]], ...] | None = None
        number: int = 0

    assert [path for path, _ in leaves(NewSection, "new")] == ["new.anything", "new.nested.[].*"]


def steps_of(tree: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each step of an outline, and whether it runs a job."""
    for name, node in tree.items():
        if "steps" in node:
            yield from steps_of(node["steps"])
        else:
            yield name, STEP_LABEL in str(node)


def test_every_step_of_every_shipped_pipeline_has_an_account() -> None:
    table, seen = load_table(), set()
    for path in RUN_FILES:
        stages = [f"{stage}-" for stage in load_shipped(path).stage_runs() if stage]
        for name, is_job in steps_of(graph(path)):
            step = next((name.removeprefix(stage) for stage in stages if name.startswith(stage)), name)
            assert step in table.steps, f"{path.name}: no account is given for {name}"
            if step not in IN_SWEEPS:
                assert (table.steps[step] == "trainer") is is_job, f"{path.name}: {name}"
            seen.add(step)
    assert table.steps.keys() - seen == NOT_IN_A_SHIPPED_GRAPH


def test_each_step_writes_into_the_runs_folder() -> None:
    (root,) = (row for row in load_table().fields if "output.root_uri" in row.names)
    assert set(root.write) == load_table().steps.keys() - {"submit", "mail"}


def test_the_hubs_token_is_read_by_both_accounts() -> None:
    readers = secret_readers(load_table())
    assert readers["model.hub_token_secret"] == ["pipeline", "trainer"]
    assert readers["secrets"] == readers["train.wandb.api_key_secret"] == ["trainer"]
    assert readers["notify.webhook"] == readers["register.hub.token_secret"] == ["pipeline"]


def test_a_step_without_an_account_and_a_field_twice_are_refused() -> None:
    content = load_table().model_dump()
    unknown, twice = copy.deepcopy(content), copy.deepcopy(content)
    unknown["fields"][0]["read"] = ["no-such-step"]
    with pytest.raises(ValidationError, match="no account is given for no-such-step"):
        Table.model_validate(unknown)
    twice["fields"] = [*twice["fields"], FieldRow(names=("data.source",), kinds=("bucket",), why="twice").model_dump()]
    with pytest.raises(ValidationError, match=r"rows name data\.source twice"):
        Table.model_validate(twice)


def test_a_function_reads_its_file_and_the_buckets_of_its_arguments() -> None:
    overrides = ["data.source=gs://code/mine.py:records", "data.source_arguments.path=gs://other/tasks.json"]
    read = {one.field: one.value for one in named(load_run_file(ROOT / "configs/digits.yaml", overrides))}
    assert read["data.source"] == "gs://code/mine.py"
    assert read["data.source_arguments.path"] == "gs://other/tasks.json"


def test_pages_and_guides_are_those_of_the_table() -> None:
    hint = "run python -m tests.support.generated_files"
    assert access_pages.PAGE.read_text() == access_pages.access_page(), hint
    guides = access_pages.guides()
    assert {path.name for path in guides} >= {"publish-and-schedule.md", "fine-tuning.md", "model-registry.md"}
    for path, text in guides.items():
        assert path.read_text() == text, f"{path}: {hint}"
