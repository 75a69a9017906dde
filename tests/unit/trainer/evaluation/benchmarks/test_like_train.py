"""Images of a benchmark that the model was trained on, in another encoding."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tests.support.data.prepared import encode, png, prepare_llava
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.near_duplicates.signature import image_signature
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.evaluation.benchmarks.like_train import images_like_train
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record


def test_a_copy_of_a_training_image_is_counted_and_shown(tmp_path: Path) -> None:
    job, prepared = prepare_llava(tmp_path, count=12)
    pointers = {"prepared_uri": prepared.uri, "features_uri": "", "features": "off"}
    write_record(open_storage(job.run.run_uri), "prepared.json", pointers)
    trained = Index.load(prepared.uri).split("train")
    (image,) = ShardReader.open(open_prepared(prepared.uri)).images(trained.sample_location(0))
    files = {
        "copy.jpg": encode(Image.open(io.BytesIO(image)), "JPEG", quality=80),
        "other.png": png(1000),
        "blank.png": encode(Image.new("RGB", (32, 32), "white")),
    }
    found = scored(job, files)
    assert (found["images_like_train"], found["images_without_signature"]) == (1, 1)
    assert found["like_train_compared"] == 1.0
    (pair,) = found["pairs_like_train"]
    assert (pair["image"], list(pair["train"])) == ("copy.jpg", [trained.ids[0], 0])
    assert Image.open(io.BytesIO(open_storage(job.run.run_uri).read(pair["picture"]))).size == (24, 24)


def scored(job: JobConfig, files: dict[str, bytes]) -> dict[str, object]:
    questions = [
        BenchmarkQuestion(f"{name} {number}", "Which?", ImageRef(name, lambda data=data: data), ("this",))
        for name, data in files.items()
        for number in range(2)
    ]
    signatures = {name: image_signature(Image.open(io.BytesIO(data))) for name, data in files.items()}
    return images_like_train(job, "pope", questions, signatures)
