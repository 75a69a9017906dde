"""What other loaders hold of the same samples: MosaicML Streaming, WebDataset, Grain and Energon, if installed.

Each has shards of as many samples as prepared data has, and lists them; none of these lists has a sample's lengths,
which packing needs. One shard is written and the others are further names of it: nothing reads them.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale.private_memory import private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench

PACKAGES = {
    "MosaicML Streaming": "streaming",
    "WebDataset": "webdataset",
    "Grain": "grain",
    "Energon": "megatron.energon",
}
CLAIMS = (("opened", "s", "open_s"), ("private memory", "MiB", "open_mib"), ("an epoch's order", "s", "order_s"),
          ("private memory of the order", "MiB", "order_mib"))  # fmt: skip


def other_indexes(bench: Bench, samples: int, data: str, *, shard_samples: int) -> None:
    """Figures of each loader that is installed, in a process of its own; says which are not."""
    for name, package in PACKAGES.items():
        if not _is_installed(package):
            install = f"pip install {package.replace('.', '-')}"
            bench.report.note(f"{name} is not installed here, so that its index is missing: {install}")
            continue
        folder = bench.scratch / f"{package}-{samples}"
        arguments = {"package": package, "folder": str(folder), "samples": samples, "shard_samples": shard_samples}
        found = bench.call(f"{__name__}:opened", arguments)
        bench.report.require(found["samples"] == samples, f"every sample is in the index of {name}")
        for claim, unit, figure in CLAIMS:
            if figure in found:
                bench.report.figure(f"{name}: {claim}", data, unit, Side(name, [found[figure]]))


def _is_installed(package: str) -> bool:
    above = package.rpartition(".")[0]
    return (not above or _is_installed(above)) and importlib.util.find_spec(package) is not None


def opened(package: str, folder: str, samples: int, shard_samples: int) -> dict[str, float]:
    """Open the samples with a loader, and let it make the first epoch's order, if it makes one."""
    place = Path(folder)
    place.mkdir()
    return OPEN[package](place, samples, shard_samples)


def _measured(action: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, seconds, and MiB of private memory that it added."""
    before, began = private_mib(), time.perf_counter()
    result = action()
    return result, time.perf_counter() - began, private_mib() - before


def _module(name: str) -> Any:
    """A package that vlmpipe does not need, and so no type checker sees."""
    return importlib.import_module(name)


def _streaming(folder: Path, samples: int, shard_samples: int) -> dict[str, float]:
    streaming, batching, world = map(_module, ("streaming", "streaming.base.batching", "streaming.base.world"))

    with streaming.MDSWriter(out=str(folder), columns={"text": "bytes"}) as writer:
        for _ in range(shard_samples):
            writer.write({"text": b"text"})
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    (shard,) = index["shards"]
    names = (f"shard.{number:05d}.mds" for number in range(samples // shard_samples))
    shards = [shard | {"raw_data": shard["raw_data"] | {"basename": name}} for name in names]
    (folder / "index.json").write_text(json.dumps(index | {"shards": shards}), encoding="utf-8")
    settings = {"shuffle": True, "batch_size": 8, "num_canonical_nodes": 1}
    dataset, open_s, open_mib = _measured(lambda: streaming.StreamingDataset(local=str(folder), **settings))
    detected = world.World.detect()
    dataset._set_shuffle_block_size(detected)  # as at the start of an epoch
    _, order_s, order_mib = _measured(lambda: batching.generate_work("random", dataset, detected, 0, 0))
    return {"samples": len(dataset), "open_s": open_s, "open_mib": open_mib, "order_s": order_s, "order_mib": order_mib}


def _webdataset(folder: Path, samples: int, shard_samples: int) -> dict[str, float]:
    """Shards in random order, whose samples are read one after the other: there is no index of samples."""
    webdataset = _module("webdataset")
    names = [str(folder / f"{number:06d}.tar") for number in range(samples // shard_samples)]
    dataset, open_s, open_mib = _measured(lambda: webdataset.WebDataset(names, shardshuffle=len(names)))
    assert dataset is not None
    return {"samples": len(names) * shard_samples, "open_s": open_s, "open_mib": open_mib}


def _grain(folder: Path, samples: int, shard_samples: int) -> dict[str, float]:
    """The order is computed for each place, so that it takes no memory."""
    grain, array_record = map(_module, ("grain.python", "array_record.python.array_record_module"))

    writer = array_record.ArrayRecordWriter(str(folder / "0"), "group_size:1")
    for _ in range(shard_samples):
        writer.write(b"text")
    writer.close()
    for number in range(1, samples // shard_samples):
        os.link(folder / "0", folder / str(number))
    paths = [str(folder / str(number)) for number in range(samples // shard_samples)]
    source, open_s, open_mib = _measured(lambda: grain.ArrayRecordDataSource(paths))
    return {"samples": len(source), "open_s": open_s, "open_mib": open_mib}


def _energon(folder: Path, samples: int, shard_samples: int) -> dict[str, float]:
    """A count of samples for each shard; offsets are in a file beside each shard, read when the shard is."""
    energon, webdataset = map(_module, ("megatron.energon", "megatron.energon.flavors.webdataset"))

    first, meta = "shard-000000.tar", folder / ".nv-meta"
    with tarfile.open(folder / first, "w") as tar:
        for number in range(shard_samples):
            member = tarfile.TarInfo(f"{number:06d}.txt")
            member.size = len(b"text")
            tar.addfile(member, io.BytesIO(b"text"))
    webdataset.BaseWebdatasetFactory.prepare_dataset(folder, [first], split_parts_ratio=[("train", 1.0)], workers=1)
    names = [first, *(f"shard-{number:06d}.tar" for number in range(1, samples // shard_samples))]
    for name, end in itertools.product(names[1:], ("", ".idx")):
        os.link(folder / f"{first}{end}", folder / f"{name}{end}")
    info = json.loads((meta / ".info.json").read_text(encoding="utf-8"))
    counts = {"shard_counts": dict.fromkeys(names, shard_samples)}
    (meta / ".info.json").write_text(json.dumps(info | counts), encoding="utf-8")
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": names}, "exclude": []}), encoding="utf-8")
    kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
    content = json.dumps({"sample_type": kind, "field_map": {"text": "txt"}})
    (meta / "dataset.yaml").write_text(content, encoding="utf-8")
    worker = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    dataset, open_s, open_mib = _measured(lambda: energon.get_train_dataset(folder, worker_config=worker, **settings))
    return {"samples": len(dataset), "open_s": open_s, "open_mib": open_mib}


OPEN = {"streaming": _streaming, "webdataset": _webdataset, "grain": _grain, "megatron.energon": _energon}
