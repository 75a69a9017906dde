"""Small images, LLaVA files and run configurations for the tests of data preparation, all made in code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.near_duplicates.table import NAME as SIGNATURES
from vlmpipe.trainer.data.prepare.chunks.merge import STATS
from vlmpipe.trainer.data.prepare.pipeline import Prepared, prepare
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage.file_sums import FileSum


def picture(seed: int = 0, side: int = 24, mode: str = "RGB") -> Image.Image:
    """Noise that compresses badly, so that a cut file is cut in its pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(seed: int = 0, side: int = 24, mode: str = "RGB") -> bytes:
    return encode(picture(seed, side, mode))


def corrupt(data: bytes) -> bytes:
    """Damage the compressed pixels of a PNG without changing its length."""
    start = data.index(b"IDAT") + 20
    return data[:start] + bytes(byte ^ 0xFF for byte in data[start : start + 40]) + data[start + 40 :]


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A good LLaVA record about image `<number>.png`."""
    return {
        "id": f"sample-{number}",
        "image": f"{number}.png",
        "conversations": conversation("<image>\nWhat is this?", "A picture.", "Which one?", f"Number {number}."),
    } | changes


def conversation(*texts: str) -> list[dict[str, str]]:
    """Human and gpt in turn."""
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]


def llava_folder(folder: Path, count: int = 40) -> tuple[Path, list[dict[str, Any]]]:
    """`count` pictures under `folder/images` and the records about them; the file itself is the test's to write."""
    images = folder / "images"
    images.mkdir(parents=True)
    for number in range(count):
        (images / f"{number}.png").write_bytes(png(number))
    return images, [record(number) for number in range(count)]


def write_json(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def job_config(root: Path, *, image_size: int = 32, tokenizer: str = "train:300", **data: Any) -> JobConfig:
    """A run with a tower of 8 x 8 patches: an image of side 32 is 16 tokens."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "patch_size": 8,
    }
    return JobConfig.model_validate(
        {
            "version": 1,
            "name": "test",
            "run": {"run_id": "run-1", "root_uri": str(root)},
            "model": {
                "tower": {"config": tower},
                "language_model": {"config": {"model_type": "qwen2"}},
                "tokenizer": tokenizer,
                "image_size": image_size,
            },
            "data": {"sequence_length": 256, "validation_fraction": 0.2, "max_reject_fraction": 0.0} | data,
            "features": {},
            "train": {"global_batch_size": 4, "optimizer": {"learning_rate": 0.001}},
            "evaluate": {},
        }
    )


def preferring(config: JobConfig) -> JobConfig:
    """The same for training on pairs."""
    return config.model_copy(update={"train": config.train.model_copy(update={"objective": "dpo"})})


def run_prepare(config: JobConfig) -> Prepared:
    return prepare(config, Progress(config.run.run_uri, "prepare-data", quiet=True))


def prepare_llava(folder: Path, *, count: int = 40, **data: Any) -> tuple[JobConfig, Prepared]:
    """Prepared data of `count` good records."""
    images, records = llava_folder(folder, count)
    source = write_json(folder / "data.json", records)
    config = job_config(folder / "root", source=str(source), image_folder=str(images), **data)
    return config, run_prepare(config)


def seal(folder: Path) -> None:
    """Complete a folder that a test wrote, or has changed, as prepare_data would."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(DONE, None)
    manifest = Manifest(FORMAT, folder.name, {}, {name: FileSum.of(path) for name, path in files.items()})
    (folder / DONE).write_bytes(manifest.to_bytes())


def prepared_files(uri: str) -> dict[str, bytes]:
    """Everything in a folder of prepared data."""
    return {str(path.relative_to(uri)): path.read_bytes() for path in Path(uri).rglob("*") if path.is_file()}


def without_signatures(folder: Path) -> None:
    """Make prepared data what format 10 had: no signatures of images, and no statistics of them."""
    (folder / SIGNATURES).unlink()
    stats = json.loads((folder / STATS).read_bytes())
    del stats["near_duplicates"]
    (folder / STATS).write_text(json.dumps(stats))
    seal(folder)
