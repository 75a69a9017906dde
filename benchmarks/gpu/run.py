"""A strategy of one process on the device, with nothing of another run beside it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

LANGUAGE, TOWER = "model.language_model.config", "model.tower.config"
WARM_UP = 2  # steps
OFFLOAD_ALL: dict[str, Any] = {"train.offload": "optimizer+weights"}
MIB, GIB = 1 << 20, 1 << 30
Found = TypeVar("Found")
One = TypeVar("One")


@dataclass(frozen=True)
class Size:
    """Of a LLaVA model, and of its packed sequences."""

    changes: dict[str, Any]
    rows: SequenceShape
    vocabulary: int
    samples: int  # in a sequence
    drawn_on_host: bool = False  # its weights: the same on every device, and slow to draw


def _size(hidden: int, layers: int, inner: int, heads: int, *, tokens: int, images: int, samples: int) -> Size:
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    language = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    heads_too = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": tokens}
    changes = {
        **{f"{LANGUAGE}.{name}": value for name, value in (language | heads_too).items()},
        **{f"{TOWER}.{name}": value for name, value in (tower | {"patch_size": 16, "image_size": 384}).items()},
        "model.image_size": 384,
        "train.loss_chunk_tokens": 1024,
        "train.deterministic": False,
        "train.compile": "off",  # TinyRun does not resolve `auto`
    }
    return Size(changes, SequenceShape(1, tokens, images, tokens // 4), 32000, samples)


TINY = Size({}, SequenceShape(2, 128, 4, 96), 300, 2, drawn_on_host=True)
MIDDLE = _size(1024, 12, 2816, 16, tokens=2048, images=2, samples=2)  # some 0.2 billion parameters
LARGE = _size(2048, 24, 5504, 16, tokens=8192, images=8, samples=8)  # 1.3 billion, as the goal says: packed at 8k


def each(bench: Bench, cases: Mapping[str, One], quick: int) -> Iterator[tuple[str, One]]:
    """One case after another, as far as the time allows; of the short form the first `quick`."""
    names = list(cases)[: quick if bench.quick else None]
    for name in bench.cases("cases", names):
        yield name, cases[name]


def case_of(size: Size, strategy: str, changes: dict[str, Any], *, cached: bool = True, passes: int = 2) -> Case:
    return Case(strategy, size.changes | changes, passes, cached, size.rows, size.vocabulary)


def alone(measure: Callable[[TinyRun], Found], case: Case, size: Size, worker: ProcessContext) -> Found:
    """What `measure` finds of a run, before and after which the device holds nothing of another."""
    empty(worker)
    try:
        return _measured(measure, case, size, worker)
    finally:
        empty(worker)


def _measured(measure: Callable[[TinyRun], Found], case: Case, size: Size, worker: ProcessContext) -> Found:
    """In a function of its own, so that the run is nobody's when it returns."""
    run = TinyRun(case, worker, samples=size.samples, drawn_on_host=size.drawn_on_host)
    try:
        return measure(run)
    finally:
        let_go(run.strategy)


def let_go(strategy: Strategy) -> None:
    """Makes an engine of DeepSpeed one that dies: hooks hold it in autograd's objects, which Python's collection does
    not see, and under ZeRO-3 tables of the process hold the modules of all engines."""
    engine: Any = getattr(strategy, "_engine", None)
    if engine is None:
        return
    engine.destroy()
    if engine.zero_optimization_stage() == 3:
        from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

        parameter_offload.FWD_MODULE_STACK.clear()
        coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
        unwrapped = inspect.getclosurevars(coordinator._PartitionedParameterCoordinator__params_to_release)
        unwrapped.nonlocals["func"].cache_clear()


def empty(worker: ProcessContext) -> None:
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()


def wait(worker: ProcessContext) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()
