"""Starting from a whole LLaVA reads each byte once and holds one file more than the strategy does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.support.drivers.weigh_start import MARK
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.published_llava import START, whole_of, with_processor, write_published
from tests.support.trainer.runs import make_run, run_ranks
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig


def weighed(jobs: list[JobConfig]) -> dict[str, list[dict[str, Any]]]:
    """By run: of each of two ranks what it held and read while its strategy was built."""
    configs = [f"{job.run.run_uri}/run.json" for job in jobs]
    printed = run_ranks("tests.support.drivers.weigh_start", ["--configs", *configs], processes=2)
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


def drop_cached_pages(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.slow
def test_a_start_reads_each_byte_once_and_holds_one_file_more_than_the_strategy(tmp_path: Path) -> None:
    """A rank reads each weight that it trains once, and frozen ones again for their digest; ranks of one machine read
    each byte of its disk once together. zero2, whose DeepSpeed copies the whole model, shows that the measure sees."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=2, patch_size=8, image_size=32).to_dict(),
        text_config=LlamaConfig(**sizes, num_hidden_layers=8, num_key_value_heads=4, vocab_size=310).to_dict(),
    )
    write_published(tmp_path / "plain", config, LlavaForConditionalGeneration(config).state_dict(), num_shards=6)
    folder = with_processor(tmp_path / "plain", tmp_path / "llava")
    files = list(folder.glob("*.safetensors"))
    largest, stored = max(file.stat().st_size for file in files), sum(file.stat().st_size for file in files)
    cases = {name: strategy_changes(name) for name in ("fsdp", "zero3", "tp", "pp")}
    cases["frozen"] = cases["fsdp"] | {"train.shard_frozen_weights": True, "model.freeze": ["tower", "language_model"]}
    cases = {**chosen(cases, lambda name: name in ("zero3", "pp")), "zero2": strategy_changes("zero2")}
    jobs = [
        make_run(tmp_path, name, START | {"model": whole_of(folder)} | changes, features="off")
        for name, changes in cases.items()
    ]
    drop_cached_pages(files)
    found = weighed(jobs)
    more = {name: max(rank["peak"] - rank["held"] for rank in ranks) for name, ranks in found.items()}
    assert more.pop("zero2") > stored > 3 * largest
    assert max(more.values()) < largest, more
    matrix = 4 * sizes["hidden_size"] * sizes["intermediate_size"]
    assert more["zero3"] <= 2 * matrix, "one in the machine's memory, as plans count, and one on the device"
    nbytes = {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}
    for name, ranks in found.items():
        times = [(tensor, read / nbytes[tensor]) for rank in ranks for tensor, read in rank["reads"].items()]
        twice = {tensor for tensor, number in times if number != 1}
        frozen = {"vision_tower", "language_model"} if name == "frozen" else {"vision_model.encoder.layers.1", "post_"}
        assert all(any(part in tensor for part in frozen) for tensor in twice), (name, twice)
        assert {number for _, number in times} <= {1, 2}
    layers = [{tensor for tensor in rank["reads"] if ".model.layers." in tensor} for rank in found["pp"]]
    assert all(layers) and not layers[0] & layers[1], "stages read their own layers"
    if WHOLE:  # elsewhere other tests have the kernel read, too
        assert sum(rank["from_disk"] for rank in next(iter(found.values()))) < 1.5 * stored
