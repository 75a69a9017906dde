"""Exports a run's checkpoint and prints by how many bytes the process grew, beside what building the model takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tests.support.trainer.checkpoints import newest_good
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--max-shard-bytes", type=int, required=True)
    options = parser.parse_args()
    job = JobConfig.load(options.config)
    store, family = open_storage(job.run.run_uri), family_of(job.model)
    tokenizer = load_tokenizer(open_storage(job.pointers().prepared_uri))
    family.blueprint(job.model, tokenizer)  # imports what it needs
    checkpoint, _ = newest_good(store)
    assert checkpoint is not None
    torch.set_num_threads(1)
    before = now_and_most_bytes()[0]
    described = export_checkpoint(job, store, checkpoint, [], max_shard_bytes=options.max_shard_bytes)
    _, exported = now_and_most_bytes()
    family.build(job.model, tokenizer)
    _, built = now_and_most_bytes()
    print(json.dumps({"export": exported - before, "build": built - before, "files": list(described["files"])}))


def now_and_most_bytes() -> tuple[int, int]:
    """What the process holds, and the most since the last call. `ru_maxrss` would count the parent before exec too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): the peak starts anew
    now, most = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


if __name__ == "__main__":
    main()
