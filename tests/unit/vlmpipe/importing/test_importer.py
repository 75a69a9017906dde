from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.guides.deepspeed import DEEPSPEED
from tests.support.guides.listings import LISTINGS
from tests.support.guides.searches import SEARCHES
from tests.support.guides.settings import COMMANDS, SETTINGS, WANDB_KEY
from tests.support.short_form import WHOLE
from vlmpipe import api
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.findings import Outcome, leaves
from vlmpipe.importing.importer import Imported, import_job_spec, import_run_file
from vlmpipe.importing.sources import Kind, Source, command_source, source_of
from vlmpipe.job_spec.build import jobs_of
from vlmpipe.job_spec.check import job_violations
from vlmpipe.job_spec.file import spec_of
from vlmpipe.pipelines.checks.finding import exit_code
from vlmpipe.trainer.config.deepspeed_keys import problems_of_new_runs

FILES = {
    **LISTINGS,
    **SEARCHES,
    **{f"{name}.json": json.dumps(value) for name, value in DEEPSPEED.items()},
    **SETTINGS,
    **COMMANDS,
}
JOB_SPECS = (Kind.JOB_SPEC, Kind.PYTHON)


def config_of(imported: Imported) -> RunConfig:
    content = parse_yaml(imported.text, imported.source)
    assert yaml.safe_load(imported.text) == content, "other programs read YAML 1.1"
    return parse_run_config(content, imported.source)


def test_there_are_26_listings_and_10_configurations_of_deepspeed() -> None:
    assert (len(LISTINGS), len(DEEPSPEED)) == (26, 10)


@pytest.mark.parametrize("name", FILES)
def test_each_file_of_a_guide_becomes_a_run_file_without_losing_a_value(name: str) -> None:
    source = source_of(FILES[name], name)
    imported = import_run_file(source)
    config = config_of(imported)
    errors = [each for job in jobs_of(config) for each in job_violations(config, job, "gs://bucket/run")]
    assert [each.text() for each in errors if each.severity == "error"] == []
    assert WANDB_KEY not in imported.text
    assert WANDB_KEY not in json.dumps(imported.as_dict())
    paths = [finding.path for finding in imported.findings]
    assert len(paths) == len(set(paths))
    assert all(finding.reason for finding in imported.findings if finding.outcome is not Outcome.EXPRESSED)
    assert all(finding.field for finding in imported.findings if finding.outcome in ("expressed", "changed"))
    if source.kind is not Kind.COMMAND:
        not_split = [leaf for leaf in leaves(source.content) if leaf[-1] not in ("command", "args")]
        assert len(imported.findings) >= len(not_split)
    for finding in imported.findings:
        if finding.outcome in (Outcome.DROPPED, Outcome.REFUSED):
            assert finding.path in imported.text.replace("\n#   ", " ")


@pytest.mark.parametrize("name", [*LISTINGS, *SEARCHES])
def test_each_listing_becomes_a_job_spec_that_check_accepts(name: str) -> None:
    imported = import_job_spec(source_of(FILES[name], name))
    corrected = spec_of(yaml.safe_load(imported.text))
    assert [each.text() for each in corrected.check(load_catalog()) if each.severity == "error"] == []
    assert WANDB_KEY not in imported.text


NAMING_MODELS = [name for name, text in FILES.items() if "Qwen2.5-VL" in text]


# Listings whose own settings the planner refuses, and its reason.
REFUSED_BY_PLAN = {"A4.5-megatron": "MFU is"}


@pytest.mark.slow  # the default suite checks the job specs of each file above, and plans one
@pytest.mark.parametrize("name", FILES)
def test_the_run_file_passes_check(name: str) -> None:
    findings = api.check(config_of(import_run_file(source_of(FILES[name], name))))
    failed = [finding.text for finding in findings if finding.state == "failed"]
    reason = REFUSED_BY_PLAN.get(name)
    assert [text for text in failed if reason is None or reason not in text] == []
    assert exit_code(findings) == 0 or reason is not None


@pytest.mark.parametrize("name", NAMING_MODELS if WHOLE else ["llama_factory.yaml"])
def test_the_run_file_that_names_a_model_passes_plan(name: str) -> None:
    assert api.plan(config_of(import_run_file(source_of(FILES[name], name)))).state != "red"


def mutated(content: Any, count: list[int]) -> Any:
    """An unknown key in every mapping."""
    if isinstance(content, dict):
        count[0] += 1
        key = f"frobnicate_{count[0]}"
        return {**{name: mutated(value, count) for name, value in content.items()}, key: 17}
    return [mutated(item, count) for item in content] if isinstance(content, list) else content


@pytest.mark.parametrize("name", [name for name in FILES if name not in COMMANDS])
def test_an_unknown_key_is_named_wherever_it_stands(name: str) -> None:
    source = source_of(FILES[name], name)
    count = [0]
    changed = Source(source.name, source.kind, mutated(source.content, count))
    results = [import_run_file(changed)]
    if source.kind in JOB_SPECS:
        results.append(import_job_spec(changed))
    for imported in results:
        named = {finding.path.rpartition(".")[2] for finding in imported.findings if finding.value == "17"}
        assert named == {f"frobnicate_{number + 1}" for number in range(count[0])}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["auto", "none", "true", "bf16", "cosine", "linear", "8", "1e-4", "\n  evil: 1", "\x1b[31m# x",
                     "{data}",
                     "'", '"', "\u2028x: 1", "- a", "${HOME}", "lora", "full_shard auto_wrap", "cpu", "nvme"]),
    st.lists(st.sampled_from(["a", "q_proj", 1, None, "\r\nx: y"]), max_size=3),
)  # fmt: skip


FUZZED = ("trl.yaml", "llama_factory.yaml", "axolotl.yaml", "A2.2-zero2.json", "B6.2-arr-coc", "tuning.yaml")


@pytest.mark.parametrize("name", FUZZED if WHOLE else FUZZED[:-1])  # a search takes longest
@settings(max_examples=300 if WHOLE else 5, deadline=None)
@given(data=st.data())
def test_any_value_of_any_key_is_answered(name: str, data: st.DataObject) -> None:
    source = source_of(FILES[name], name)
    places = [path for path in leaves(source.content) if path != ("worker_pool_specs",)]
    content = json.loads(json.dumps(source.content))
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4, unique=True)):
        place = content
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = data.draw(VALUES)
    imported = import_run_file(Source(name, source.kind, content))
    config = config_of(imported)
    assert config.name
    assert all(line.isprintable() for line in imported.text.splitlines())
    if source.kind is not Kind.JOB_SPEC:
        assert len(imported.findings) == len(leaves(content))


def test_a_warm_up_without_a_schedule_meets_no_assumed_one() -> None:
    content = {"scheduler": {"type": None, "params": {"warmup_num_steps": 1000}}, "zero_optimization": {"stage": 2}}
    imported = import_run_file(Source("ds.json", Kind.DEEPSPEED, content))
    assert len(imported.findings) == 3
    assert (train := config_of(imported).train).warmup_steps == 1000 and train.warmup_fraction is None


def test_keys_that_a_stage_ignores_are_dropped() -> None:
    zero = {"stage": 2, "stage3_prefetch_bucket_size": 5, "allgather_partitions": True, "reduce_bucket_size": 5000}
    imported = import_run_file(Source("ds.json", Kind.DEEPSPEED, {"zero_optimization": zero}))
    assert config_of(imported).train.deepspeed == {"zero_optimization": {"reduce_bucket_size": 5000}}
    dropped = {found.path: found.reason for found in imported.findings if found.outcome is Outcome.DROPPED}
    assert "zero2 ignores it" in dropped["zero_optimization.stage3_prefetch_bucket_size"]
    assert "does not use it" in dropped["zero_optimization.allgather_partitions"]


def test_values_that_deepspeed_takes_unseen_are_refused() -> None:
    profiler = {"enabled": "yes", "profile_step": 0, "top_modules": 3}
    content = {"zero_optimization": {"stage": 2}, "flops_profiler": profiler}
    imported = import_run_file(Source("ds.json", Kind.DEEPSPEED, content))
    assert (deepspeed := config_of(imported).train.deepspeed) == {"flops_profiler": {"top_modules": 3}}
    assert not problems_of_new_runs(deepspeed, "zero2")
    refused = {found.path: found.reason for found in imported.findings if found.outcome is Outcome.REFUSED}
    assert set(refused) == {"flops_profiler.enabled", "flops_profiler.profile_step"}
    assert "expected true or false" in refused["flops_profiler.enabled"]


def test_two_values_with_control_characters_are_both_refused() -> None:
    content = {"zero_optimization": {"stage": 2, "overlap_comm": "\x1b[31m", "contiguous_gradients": "\x1b[31m"}}
    imported = import_run_file(Source("ds.json", Kind.DEEPSPEED, content))
    refused = {finding.path for finding in imported.findings if finding.outcome == Outcome.REFUSED}
    assert refused == {"zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients"}
    assert config_of(imported).train.strategy == "zero2"


def test_texts_of_a_file_end_no_comment_and_no_value() -> None:
    evil = "x\nname: evil\r\u2028\x1b]0;t\x07"
    text = json.dumps({"zero_optimization": {"stage": 2, evil: evil}, evil: 1, "checkpoint": {"a": evil}})
    imported = import_run_file(source_of(text, "ds.json"))
    assert config_of(imported).name == "run-ds"
    assert "\x1b" not in imported.text + json.dumps(imported.as_dict())
    assert all(line.startswith(("#", " ")) or ":" in line for line in imported.text.splitlines() if line)
    command = command_source("torchrun train.py --x '\nname: evil' --y '\x1b[31m'")
    imported = import_run_file(command)
    assert config_of(imported).name == "command"
    assert "control characters" in imported.text


def test_a_word_for_true_is_no_machine() -> None:
    pool = {"machine_spec": "true", "replica_count": 1, "container_spec": {"image_uri": "image"}}
    imported = import_job_spec(Source("job.yaml", Kind.JOB_SPEC, {"worker_pool_specs": [pool]}))
    assert yaml.safe_load(imported.text)["worker_pool_specs"][0]["machine_spec"]["machine_type"] == "n1-standard-8"
