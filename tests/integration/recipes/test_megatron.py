"""recipes/megatron in processes of its own: every layout makes the steps of one process, and of plain transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.paths import ROOT

RECIPE, ENVIRONMENT = ROOT / "recipes/megatron", ROOT / "build/recipes/megatron"
BASE = ROOT / "build/recipes/tiny-qwen2-5-vl"
STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (ENVIRONMENT / ".installed").is_file(), reason="make recipe-megatron makes its environment"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with answers of unequal lengths, so that a mean of means would show."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for number in range(16):
        Image.new("RGB", (56, 56), (16 * number, 255 - 16 * number, 128)).save(folder / f"{number}.png")
        question = [{"type": "image"}, {"type": "text", "text": f"Which number is {number}?"}]
        answer = " ".join(["7"] * (1 + number % 5))
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        lines.append(json.dumps({"messages": messages, "images": [f"{number}.png"]}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def train(
    data: Path, folder: Path, processes: int, *, tensor: int = 1, micro: int = 8, code: int = 0, **more: Any
) -> str:
    """Train into `folder`. Returns what the program said."""
    given = {
        "data": data, "model": BASE, "output": folder / "out", "checkpoints": folder / "checkpoints", "steps": STEPS,
        "batch": 8, "micro-batch": micro, "save-every": 2, "seed": 3, "learning-rate": 1e-3, "weight-decay": 0.01,
        "clip-norm": 1.0, "schedule": "cosine", "precision": "fp32", "tensor-parallel": tensor, **more,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    launch = [f"--nproc-per-node={processes}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", "-m", "torch.distributed.run", *launch, RECIPE / "train.py", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLMPIPE_METRICS": str(metrics), "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert (done.returncode != 0) == bool(code), done.stdout[-3000:] + done.stderr[-3000:]
    assert not code or f"exitcode  : {code}" in done.stderr, done.stderr[-3000:]
    return done.stdout


def same_steps(one: Path, other: Path, *, of: int = STEPS) -> None:
    """Losses, and gradients: AdamW would hide a wrong scale of them in the weights, its moments do not."""
    assert losses(one) == pytest.approx(losses(other)[-of:], rel=1e-6)
    ours, theirs = (torch.load(folder / f"checkpoints/checkpoint-{STEPS}/optimizer.pt") for folder in (one, other))
    for key in ("exp_avg", "exp_avg_sq"):
        assert ours[key].keys() == theirs[key].keys()
        for name, tensor in ours[key].items():
            assert float((tensor - theirs[key][name]).abs().max()) < 1e-4 * float(tensor.abs().max()), name


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "alone"
    train(data, folder, 1)
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_first_loss_is_that_of_plain_transformers(alone: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes/parameter-server"))
    from data import MicroBatches, Samples, summed_loss  # type: ignore[import-not-found]
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    loss, tokens = summed_loss(model, MicroBatches(Samples(data, BASE), 8, 3)[0])
    assert losses(alone)[0] == pytest.approx(float(loss) / tokens, rel=1e-6)
    before, after = load_file(BASE / "model.safetensors"), load_file(alone / "out/model.safetensors")
    assert before.keys() == after.keys()
    assert all(bool((tensor != before[name]).any()) for name, tensor in after.items()), "it learns something"


@pytest.mark.parametrize(
    ("processes", "tensor", "micro"),
    [(2, 2, 8), (2, 1, 4), (1, 1, 2), (4, 2, 2)],
    ids=["tp2", "dp2", "micro", "tp2-dp2"],
)
def test_layouts_make_the_same_steps(
    alone: Path, data: Path, tmp_path: Path, processes: int, tensor: int, micro: int
) -> None:
    train(data, tmp_path, processes, tensor=tensor, micro=micro)
    same_steps(tmp_path, alone)


def test_a_checkpoint_is_resumed_by_another_layout(alone: Path, data: Path, tmp_path: Path) -> None:
    checkpoint = alone / "checkpoints/checkpoint-2"
    train(data, tmp_path, 2, tensor=2, resume=checkpoint)
    same_steps(tmp_path, alone, of=STEPS - 2)


def test_bf16_keeps_fp32_copies(alone: Path, data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 2, tensor=2, precision="bf16")
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=0.02)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    state = torch.load(tmp_path / "checkpoints/checkpoint-2/optimizer.pt")
    assert {tensor.dtype for tensor in state["weights"].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('tensor-parallel, "2"', 'tensor-parallel, "3"', "num_attention_heads (4) must be a multiple"),
        ("processes_per_replica: 2", "processes_per_replica: 3", "3 processes cannot be grouped into 2"),
        ("micro_batch_size: 8", "micro_batch_size: 5", "global batch of 16 samples cannot be split"),
        ("precision: fp32", "precision: fp16", "trains in fp32 or bf16"),
    ],
)
def test_a_bad_layout_is_refused_in_words_before_it_starts(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = (RECIPE / "run.yaml").read_text()
    changed = text.replace(old, new)
    assert changed != text
    (run_file := tmp_path / "run.yaml").write_text(changed)
    command = [ENVIRONMENT / "bin/python", "-W", "ignore", RECIPE / "layout.py", run_file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 64, done.stderr
    assert sentence in done.stderr


def test_a_bad_layout_does_not_start(data: Path, tmp_path: Path) -> None:
    assert "cannot be split into micro-batches of 3" in train(data, tmp_path, 2, tensor=2, micro=3, code=64)
    assert not (tmp_path / "out").exists()
