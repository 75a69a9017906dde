"""Part `relevance`: textures of an image beside its decoding; a step of training beside its forward passes."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.support.suite import Bench
from benchmarks.support.workloads import CONFIGS, SETTINGS
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate
from vlmpipe.trainer.feature_cache.encode import build
from vlmpipe.trainer.feature_cache.store import features_uri
from vlmpipe.trainer.features.relevance.textures import textures_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.setup.training import build_training
from vlmpipe.trainer.storage import open_storage

SIZE, CELL = 448, 28  # pixels of an image and of a token's cell, as Qwen2.5-VL has them
IMAGES = 32
# Wider than the shipped run file, whose forward pass is so short that Python's own time decides.
WIDER: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 8, 8]},
}  # fmt: skip


def relevance(bench: Bench) -> None:
    """Both comparisons."""
    bench.expect(2)
    textures(bench)
    step(bench)


def textures(bench: Bench) -> None:
    """Of noise in 8-bit colours, which costs as much as a picture, beside decoding a smooth JPEG of the same size."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=np.uint8)
    images = [torch.from_numpy(one).permute(2, 0, 1).contiguous().float() / 255 for one in pixels]
    files = [_jpeg(generator.integers(0, 256, (14, 14, 3), dtype=np.uint8)) for _ in range(IMAGES)]
    works = {"textures": partial(_all_textures, images), "decoding": partial(_decoded, files)}
    found = bench.take_timed_turns("textures", works)
    sides = ("all 22 channels", found["textures"]), ("decoding a JPEG by Pillow", found["decoding"])
    bench.report.compare_rates("textures: beside decoding", f"{SIZE} x {SIZE} pixels", "images", *sides)


def step(bench: Bench) -> None:
    """A whole step with cached features, its update included, beside as many forward passes as it draws selections."""
    job = _job(bench)
    setup = build_training(job, bench.worker)
    steps = range(2 if bench.quick else 6)
    batches = [collate(setup.loader.sequences_for_step(number, 0, 1), setup.image_source) for number in steps]
    assert job.model.relevance
    works = {
        "step": partial(_steps, setup.strategy, batches),
        "passes": partial(_passes, setup.strategy, batches, job.model.relevance.samples),
    }
    found = bench.take_timed_turns("relevance", works)
    passes = f"{job.model.relevance.samples} forward passes"
    bench.report.compare_rates(
        "step of relevance: or its forward passes", "mosaics, 512 wide", "sequences", ("a step", found["step"]),
        (passes, found["passes"]),
    )  # fmt: skip
    setup.loader.close()


def _jpeg(small: np.ndarray) -> bytes:
    written = io.BytesIO()
    Image.fromarray(small).resize((SIZE, SIZE)).save(written, "JPEG")
    return written.getvalue()


def _all_textures(images: list[torch.Tensor]) -> float:
    for image in images:
        textures_of(image, CELL)
    return float(len(images))


def _decoded(files: list[bytes]) -> float:
    for data in files:
        Image.open(io.BytesIO(data)).convert("RGB").load()
    return float(len(files))


def _steps(strategy: Any, batches: list[PackedBatch]) -> float:
    for batch in batches:
        strategy.forward_backward([batch], len(batch.label_ids))
        strategy.step(1.0)
    return float(sum(len(batch.input_ids) for batch in batches))


def _passes(strategy: Any, batches: list[PackedBatch], count: int) -> float:
    for batch in batches:
        for _ in range(count):
            strategy.forward_loss(batch)
    return float(sum(len(batch.input_ids) for batch in batches))


def _job(bench: Bench) -> JobConfig:
    """The stage relevance of configs/arr-coc.yaml, with a wider language model of random weights; encoded."""
    bench.at("data and features of the mosaics")
    text = "model.pretrained.config.text_config"
    wider = [f"{text}.{name}={json.dumps(value)}" for name, value in WIDER.items()]
    overrides = [*SETTINGS, *wider, "model.pretrained.config.vision_config.out_hidden_size=512", "data.max_samples=400"]
    config = load_run_file(CONFIGS / "arr-coc.yaml", overrides).stage_runs()["relevance"]
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="relevance", root_uri=str(bench.scratch))))
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        prepared_uri = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri
        uri = features_uri(job.run.features_root, job.model, job.train.precision)
        pointers = DataPointers(prepared_uri=prepared_uri, features_uri=uri, features="reuse")
        open_storage(job.run.run_uri).write("prepared.json", pointers.model_dump_json().encode())
        build(job, bench.worker)
    return job
