"""Adapters in real vLLM, fetched from a bucket by the serving image's start program: answers are the evaluation's.

The base has other image sizes and another chat template than the run: vLLM would take them.
Needs `make recipe-vllm`. `make test-engines` runs all of it, `make test-whole` one family.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.fakes.gcs.server import FakeGcs
from tests.support.engines.comparison import Comparison, compare
from tests.support.engines.trained_runs import SETTINGS, trained_runs, write_pictures
from tests.support.engines.vllm_server import ENVIRONMENT, NEWEST, START_PROGRAM, needs_vllm, running_vllm
from tests.support.paths import ROOT
from tests.support.trainer.runs import make_run, run_ranks, train_runs
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.serving_container import arguments_of
from vlmpipe.config.vllm import load_vllm
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import gcs, open_storage
from vlmpipe.trainer.storage.export_manifest import MARKER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200), pytest.mark.slow, needs_vllm]

ALL = os.environ.get("VLMPIPE_ENGINES") == "all"
FAMILIES = ("qwen2_5_vl", "smolvlm") if ALL else ("qwen2_5_vl",)
BASE, ADAPTER = "gs://bucket/base", "gs://bucket/registry/tiny/1/model"
MOST_DIFFERENCE = 1e-4  # of log probabilities, in fp32
MAX_UNROUNDED = 2  # answers that differ because evaluation rounds what a frozen vision encoder gives
LORA = {"rank": 12, "alpha": 24.0, "export": "adapter"}
# Ways out of a projector that is trained whole beside an adapter, and what vLLM refuses otherwise.
RUNS: dict[str, dict[str, Any]] = {
    "frozen": {"freeze": ["tower", "projector"], "lora": LORA},
    "adapted": {"freeze": [], "lora": LORA | {"parts": ["language_model", "projector", "tower"]}},
    "merged": {"freeze": ["tower"], "lora": LORA | {"export": "merged"}},
    "whole": {"freeze": ["tower"], "lora": LORA},
    "dora": {"freeze": ["tower", "projector"], "lora": LORA | {"use_dora": True}},
}
ANSWERING = ("frozen", "adapted", "merged") if ALL else ("frozen", "adapted")
NAMES = {"qwen2_5_vl": tuple(RUNS) if ALL else ANSWERING, "smolvlm": ANSWERING}
SIZES = ("size", "min_pixels", "max_pixels", "max_image_size")  # of image processors


def other_base(export: Path, folder: Path) -> Path:
    """A copy of an export with other settings, as a published model has beside a run's own."""
    shutil.copytree(export, folder, ignore=shutil.ignore_patterns(MARKER))
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            for section in (content, content.get("image_processor", {})):
                section |= {key: doubled(section[key]) for key in SIZES if section.get(key)}
            (folder / name).write_text(json.dumps(content))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{- 'of the base ' -}}" + template)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{{- 'of the base ' -}}" + template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def doubled(value: Any) -> Any:
    return {key: doubled(inner) for key, inner in value.items()} if isinstance(value, dict) else 2 * value


def qwen(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The published model of the recipes, and the section of a run on it. Large weights make answers differ."""
    subprocess.run([sys.executable, ROOT / "recipes/tiny_qwen2_5_vl.py", folder], check=True, capture_output=True)
    weights = load_file(folder / "model.safetensors")
    large = {name: weight * (4 if weight.ndim > 1 else 1) for name, weight in weights.items()}
    save_file(large, folder / "model.safetensors", {"format": "pt"})
    return folder, {"family": "qwen2_5_vl", "min_pixels": 784, "max_pixels": 6272}


def smolvlm(root: Path) -> tuple[Path, dict[str, Any]]:
    """The export of a run, and the section of another on it."""
    (first,) = trained_runs(root, ["smolvlm"]).values()
    section = first.model.model_dump(mode="json", exclude_unset=True)
    return Path(first.run.run_uri) / "export", section


BASES = {"qwen2_5_vl": qwen, "smolvlm": smolvlm}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], JobConfig]:
    """The run of a family by a name in RUNS. All runs of a family are trained when the first is asked for."""
    root = tmp_path_factory.mktemp("adapters")
    trained = functools.cache(lambda family: trained_adapters(root / family, family))
    return lambda family, name: trained(family)[name]


def trained_adapters(root: Path, family: str) -> dict[str, JobConfig]:
    published, family_section = BASES[family](root / "published")
    base = other_base(published, root / "base")
    sources = {"pretrained": {"weights": str(base)}, "tokenizer": str(published)}
    data, made = write_pictures(root / "data"), dict[str, JobConfig]()
    for name in NAMES[family]:
        changes = {"train.optimizer.learning_rate": 0.01, "name": name}
        run = {"model": family_section | sources | RUNS[name], "data": data, **SETTINGS, **changes}
        made[name] = make_run(root / "runs", name, run, features="off")
    train_runs(list(made.values()), processes=1, timeout_s=900)
    for job in made.values():
        sync_run(job)
        run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    return made


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
        gcs._client_for.cache_clear()
        yield server


def settings_of(job: JobConfig) -> RunSettings:
    """run.json of a run whose base and registered files are in the bucket, after copying them there."""
    settings: dict[str, Any] = json.loads((Path(job.run.run_uri) / "run.json").read_text())
    for folder, address in ((settings["model"]["pretrained"]["weights"], BASE), (f"{job.run.run_uri}/export", ADAPTER)):
        store = open_storage(address)
        for path in Path(folder).iterdir():
            store.write(path.name, path.read_bytes())
    settings["model"]["pretrained"]["weights"] = BASE
    return RunSettings.of_record(settings, "run.json")


def compared(job: JobConfig, log: Path, without: str = "") -> Comparison:
    settings = settings_of(job)
    arguments = [one for one in arguments_of(settings, ADAPTER) if not without or not one.startswith(without)]
    with running_vllm(arguments, {}, log, program=START_PROGRAM) as url:
        return compare(job, url, settings.model_name)


@pytest.mark.parametrize("name", ANSWERING)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_answers_as_it_was_evaluated(
    run_of: Callable[[str, str], JobConfig], bucket: FakeGcs, family: str, name: str, tmp_path: Path
) -> None:
    found = compared(run_of(family, name), tmp_path / "log")
    found.keep(f"{family} adapter, {name}", NEWEST.title)
    assert found.questions >= 15 and found.distinct_answers > found.questions / 2, "answers that could differ"
    assert found.equal_prompts == found.questions
    assert found.largest_difference <= MOST_DIFFERENCE
    assert found.equal_answers + found.unrounded_answers == found.questions, found.others
    assert found.unrounded_answers <= MAX_UNROUNDED


@pytest.mark.skipif(not ALL, reason="make test-engines")
@pytest.mark.parametrize("without", ["--enable-tower-connector-lora", "--settings="])
def test_what_deploy_adds_has_an_effect(
    run_of: Callable[[str, str], JobConfig], bucket: FakeGcs, without: str, tmp_path: Path
) -> None:
    found = compared(run_of("qwen2_5_vl", "adapted"), tmp_path / "log", without)
    found.keep(f"qwen2_5_vl adapter without {without.strip('-=')}", NEWEST.title)
    assert found.largest_difference > 100 * MOST_DIFFERENCE
    assert found.equal_answers < found.questions / 2
    assert (found.equal_prompts == 0) == (without == "--settings=")


@pytest.mark.skipif(not ALL, reason="make test-engines")
@pytest.mark.parametrize(("name", "said"), [("whole", "modules_to_save"), ("dora", "does not yet support DoRA")])
def test_vllm_opens_no_adapter_that_check_refuses(
    run_of: Callable[[str, str], JobConfig], bucket: FakeGcs, name: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="vLLM did not start"):
        compared(run_of("qwen2_5_vl", name), tmp_path / "log")
    assert said in (tmp_path / "log").read_text()


ASK = """
import json, sys
from typing import get_args
from vllm.config.lora import MaxLoRARanks
from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.models.registry import ModelRegistry
found = {}
for model_type, name in json.loads(sys.argv[1]).items():
    entry = ModelRegistry.models.get(name)
    kind = entry.load_model_cls() if entry else None
    others = getattr(kind, "supports_tower_connector_lora", False)
    found[model_type] = kind and [bool(supports_lora(kind)), bool(others)]
print(json.dumps({"ranks": get_args(MaxLoRARanks), "types": found}))
"""


def test_the_table_of_check_is_the_installed_vllms() -> None:
    known = load_vllm()
    assert (known.version, known.transformers) == (NEWEST.vllm, NEWEST.transformers)
    names = {model_type: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type] for model_type in known.adapters}
    command = [str(ENVIRONMENT / "bin/python"), "-c", ASK, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert tuple(found["ranks"]) == known.lora_ranks
    wrong = {}
    for model_type, parts in known.adapters.items():
        there = found["types"][model_type]
        language, others = there or (False, False)
        right = (parts is None) == (there is None) and ("language_model" in (parts or ())) == language
        if not right or (set(parts or ()) > {"language_model"} and not others):
            wrong[model_type] = (parts, there)
    assert wrong == {}
