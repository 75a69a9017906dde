"""Exports of every family in real vLLM: they load, and prompts, answers and probabilities are the evaluation's.

Needs `make recipe-vllm`. `make test-engines` runs all of it, `make test-whole` one family on the newest release.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines.chat_contract import FOUND, RECORD, answers_of
from tests.support.engines.comparison import compare
from tests.support.engines.trained_runs import NATIVE, PUBLISHED, trained_runs
from tests.support.engines.vllm_server import RELEASES, needs_vllm, vllm_of
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200), pytest.mark.slow, needs_vllm]

ALL = os.environ.get("VLMPIPE_ENGINES") == "all"
SHORT = ("llava", "vllm-032")
FAMILIES = [*NATIVE, *PUBLISHED] if ALL else [SHORT[0]]
CASES = [(family, release) for family in FAMILIES for release in RELEASES if ALL or (family, release) == SHORT]
# Image tokens of these see each other in transformers, and in vLLM only by attention for GPUs.
CAUSAL = ("gemma3",)
# This release overrides a deployment's choice of Pillow for these types, in their own `get_hf_processor`, and heeds a
# request's.
RESIZED_BY_TORCHVISION = {("qwen2_5_vl", "vllm-027"), ("qwen3_vl", "vllm-027")}
BY_PILLOW = {"mm_processor_kwargs": {"use_fast": False}}
MOST_DIFFERENCE = 1e-3  # of log probabilities: sums in another order, in fp32, under weights that are large


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], JobConfig]:
    """The run of a family, trained when it is first asked for."""
    root = tmp_path_factory.mktemp("engines")
    return functools.cache(lambda family: trained_runs(root / family, [family])[family])


@pytest.mark.parametrize(("family", "release"), CASES)
def test_vllm_answers_as_the_evaluation(
    run_of: Callable[[str], JobConfig], family: str, release: str, tmp_path: Path
) -> None:
    job = run_of(family)
    run = Path(job.run.run_uri)
    settings = RunSettings.read(open_storage(str(run)))
    with vllm_of(settings, str(run / "export"), tmp_path / "log", release=RELEASES[release]) as url:
        overridden = (family, release) in RESIZED_BY_TORCHVISION
        options = BY_PILLOW if overridden else None
        found = compare(job, url, settings.model_name, causal_images=family in CAUSAL, options=options)
        contract = answers_of(url.removesuffix("/v1"), settings.model_name) if (family, release) == SHORT else {}
    if contract:
        FOUND.write_text(json.dumps({"server": RELEASES[release].title, "cases": contract}, indent=1) + "\n")
    found.keep(family, RELEASES[release].title)
    assert found.questions >= 15
    assert found.distinct_answers > found.questions / 2, "answers that could differ"
    assert found.equal_prompts == found.questions
    if overridden:
        assert found.difference_as_requested <= MOST_DIFFERENCE < found.largest_difference
        return
    assert found.largest_difference <= MOST_DIFFERENCE
    if family in CAUSAL:
        assert found.equal_answers < found.questions, "it attends as the evaluation does: take it out of CAUSAL"
        return
    assert found.equal_answers == found.questions, found.others
    if contract:
        assert contract == json.loads(RECORD.read_text())["cases"], f"it answers otherwise: {FOUND} has what it said"


@pytest.mark.skipif(not ALL, reason="make test-engines")
def test_an_export_in_bf16_answers_as_it_was_evaluated(tmp_path: Path) -> None:
    """Both compute in fp32, from the rounded weights."""
    job = trained_runs(tmp_path / "run", ["llava"], {"checkpoint.export_dtype": "bf16"})["llava"]
    settings = RunSettings.read(open_storage(job.run.run_uri))
    with vllm_of(settings, f"{job.run.run_uri}/export", tmp_path / "log") as url:
        found = compare(job, url, settings.model_name)
    found.keep("llava in bf16", RELEASES[SHORT[1]].title)
    assert found.distinct_answers > found.questions / 2, "answers that could differ"
    assert found.equal_answers == found.equal_prompts == found.questions, found.others
    assert found.largest_difference <= MOST_DIFFERENCE
