"""Compiled layers: the same numbers, one graph for layers that are alike, and no more held than checkpointing allows.

By `aot_eager`, which goes all the way but for making kernels; those of inductor are for the long form. Strategies over
real ranks are in test_equalities.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from tests.support.short_form import chosen
from tests.support.trainer.measure_memory import draw, packed_batch
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.config.train_options import CompileBackend
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.compile import CACHE_VARIABLE, cache_folder, compile_layers, compiled_graphs
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.fsdp import shard
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

VOCABULARY = 300
LAYERS = 2
KEPT_AT_MOST = {"none": 0.9, "selective": 0.7, "full": 0.3}  # of what layers keep that are not compiled
ROWS_AND_IMAGES = ((2, 4), (2, 6), (1, 3))  # full micro-batches, and the last one of an epoch


class Steps(NamedTuple):
    """Losses, the norm of all gradients, bytes that the first forward pass kept, and graphs compiled."""

    losses: list[float]
    norm: float
    kept_bytes: int
    graphs: int


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def steps(checkpointing: str, *, backend: CompileBackend | None, sharded: bool = False, online: bool = False) -> Steps:
    changes: dict[str, Any] = {
        "train.activation_checkpointing": checkpointing,
        "model.language_model.config.num_hidden_layers": LAYERS,
        "model.language_model.config.hidden_size": 32,
    }
    job = Case("ddp", changes | ({"features.cache": "off"} if online else {})).config(1)
    family = family_of(job.model)
    torch.manual_seed(0)
    model = family.skeleton(job.model, vocabulary=VOCABULARY)
    draw(model)
    module = family.training_module(job.model, model, cached=not online).train()
    Recompute.of(job.train).apply(family, module)
    graphs = compiled_graphs()
    if backend:
        compile_layers(family.blocks(module), backend)
    if sharded:
        shard(module, family.blocks(module), job.train, init_device_mesh("cpu", (1,)))
    losses: list[float] = []
    kept: list[int] = []
    for rows, images in ROWS_AND_IMAGES:
        shape = SequenceShape(rows, tokens=128, images=images, label_tokens=90)
        batch = packed_batch(job.model, shape, VOCABULARY, cached=not online, sequence_samples=1 + len(losses))
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module(**{name: value for name, value in vars(batch).items() if value is not None})
        loss.backward()
        losses.append(loss.item())
        kept.append(sum(sizes.values()))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    whole = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    norm = torch.stack([gradient.norm() for gradient in whole]).norm().item()
    return Steps(losses, norm, kept[0], compiled_graphs() - graphs)


CASES = {f"{kind}{', in slices' * sharded}": (kind, sharded) for kind in KEPT_AT_MOST for sharded in (False, True)}


@pytest.mark.parametrize("case", chosen(CASES, lambda name: name == "full, in slices"))
def test_compiled_layers_compute_the_same_and_save_what_checkpointing_allows(case: str) -> None:
    """FSDP gives layers a class of their own, in which checkpointing must still happen."""
    checkpointing, sharded = CASES[case]
    found = steps(checkpointing, backend="aot_eager", sharded=sharded)
    eager = steps("none", backend=None, sharded=sharded)
    assert found.losses == pytest.approx(eager.losses, rel=1e-6)
    assert found.norm == pytest.approx(eager.norm, rel=1e-6)
    assert found.graphs == 2, "one for each number of rows, however many layers and samples"
    assert found.kept_bytes < KEPT_AT_MOST[checkpointing] * eager.kept_bytes


@pytest.mark.slow
def test_kernels_of_inductor_compute_nearly_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    found, eager = steps("full", backend="inductor", sharded=True), steps("none", backend=None, sharded=True)
    assert found.losses == pytest.approx(eager.losses, rel=1e-5)
    assert found.norm == pytest.approx(eager.norm, rel=1e-4)


@pytest.mark.slow
def test_a_tower_that_runs_online_is_compiled_for_any_number_of_images() -> None:
    found, eager = steps("none", backend="aot_eager", online=True), steps("none", backend=None, online=True)
    assert found.losses == pytest.approx(eager.losses, rel=1e-6)
    assert found.norm == pytest.approx(eager.norm, rel=1e-6)
    assert found.graphs > 2


@pytest.mark.parametrize("must", [True, False])
def test_what_cannot_be_compiled_ends_a_run_only_if_it_must(must: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options | {"backend": fails}))
    layer = torch.nn.Linear(2, 2)
    compile_layers(SimpleNamespace(language_layers=[layer], tower_layers=[]), "aot_eager", must=must)  # type: ignore[arg-type]
    if must:
        with pytest.raises(BackendCompilerFailed, match="no kernel"):
            layer(torch.ones(1, 2))
    else:
        assert torch.equal(layer(torch.ones(1, 2)), torch.nn.Linear.forward(layer, torch.ones(1, 2)))


def test_each_environment_has_its_own_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    here = cache_folder()
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert cache_folder() != here == here.expanduser()


def test_inductor_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert shutil.which(os.environ["CXX"]) is None
    job = Case("ddp").config(1)
    family = family_of(job.model)
    with torch.device("meta"):
        module = family.training_module(job.model, family.skeleton(job.model, vocabulary=VOCABULARY), cached=True)
    with pytest.raises(ConfigError, match="no-such-compiler is not on the PATH"):
        compile_layers(family.blocks(module), "inductor")
