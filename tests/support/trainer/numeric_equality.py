"""What "this run trained as that one" means in numbers, on any processor.

Two runs whose sums are taken in another order (other kernels, threads, ranks) have gradients that differ by rounding
errors. What becomes of these errors decides what can be compared, and how:

- Losses and gradient norms are sums over everything: their errors stay tiny beside their size.
- AdamW divides a gradient by its own size. Of an element whose gradient is next to nothing, rounding errors decide the
  sign of a whole update: two correct runs then differ by up to twice the learning rate there, on one processor and not
  on another. One tolerance for all weights is therefore a fact about one processor.
- The same division hides wrong gradients: of a parameter whose gradients are all 1.01 times too large, AdamW makes the
  same weights, and the losses are equal to the last digit.

So gradients are compared where they are kept: in AdamW's moments, which are running averages of gradients and of their
squares. Their errors are small beside the largest of their parameter. Weights and their averages are compared element
by element, each within what such errors can do to its updates: tightly where its gradients were large, and not at all
where they were noise. How large they were at each step is read from the checkpoints of the reference, which is why it
needs EVERY_STEP.

Runs that compute the same sums in the same order (resumed, recomputed, gathered from nearby) are equal to the bit, and
tests of these use `torch.equal`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trainer.equalities import RELATIVE, fetched, trained_weights
from tests.support.trainer.optimizer_state import Moments, read_moments
from tests.support.trainer.runs import losses, metrics
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.storage import open_storage

# Of the run that others are compared with: its gradients at each step are read from its checkpoints.
EVERY_STEP: dict[str, Any] = {"train.checkpoint_every_steps": 1, "train.keep_checkpoints": 1000}

NORM = 1e-4  # largest relative difference of gradient norms; of losses it is RELATIVE

# Largest difference of a gradient, as a share of the largest of its parameter. 8 times the largest that was found
# between kernels for any two of SSE2, AVX2 and AVX-512, and a tenth of the 1 % that must be refused.
GRADIENT = 1e-3
# Sums whose true value is 0 (below) were found to be up to 6e-12 of the largest gradient of the model.
NOISE = 1e-9

# An attention's softmax does not change when all its keys are moved by the same vector: without rotary positions the
# gradient of a bias of keys is 0, and what is computed is rounding errors alone.
NOTHING_BUT_NOISE = re.compile(r"vision_(tower|model).*\.k_proj\.bias$")

FLOAT32 = 1e-6  # of a weight, for the roundings of its few updates


def require_equal_training(job: JobConfig, reference: JobConfig) -> None:
    """Losses, gradient norms, AdamW's moments, weights and, where both keep them, their averages.

    Raises AssertionError with the parameter and how far apart it is. `reference` has checkpoints of EVERY_STEP.
    """
    assert losses(job) == pytest.approx(losses(reference), rel=RELATIVE)
    norms, expected = ([line["grad_norm"] for line in metrics(each)] for each in (job, reference))
    assert norms == pytest.approx(expected, rel=NORM)
    moments, tolerances = _steps_of(reference.run.run_uri)
    (last,) = moments_of_steps(job, committed(open_storage(job.run.run_uri))[-1:])
    require_equal_moments(last, moments)
    for averaged in (False, True) if reference.train.ema_decay and job.train.ema_decay else (False,):
        weights, wanted = (trained_weights(each, averaged=averaged) for each in (job, reference))
        require_equal_weights(weights, wanted, tolerances)


@functools.lru_cache(maxsize=4)
def _steps_of(reference_uri: str) -> tuple[dict[str, Moments], dict[str, Tensor]]:
    """The last moments of a reference, with which several runs are compared, and the tolerances of its weights."""
    reference = JobConfig.load(f"{reference_uri}/run.json")
    steps = moments_of_steps(reference)
    assert len(steps) == len(losses(reference)), "train the reference with EVERY_STEP"
    return steps[-1], weight_tolerances(steps, reference.train.optimizer)


def require_equal_moments(found: Mapping[str, Moments], expected: Mapping[str, Moments]) -> None:
    """Both moments, each relative to the largest of its parameter.

    The second is compared by its root: a running mean of squares has as its root a length, which errors of gradients
    change by no more than their own size.
    """
    _require_names({name: moments.first for name, moments in found.items()}, expected)
    noise = NOISE * _largest(moments.first for moments in expected.values())
    for name, moments in expected.items():
        assert float(moments.first.abs().max()) > noise / GRADIENT or NOTHING_BUT_NOISE.search(name), (
            f"{name}: its gradients are next to nothing beside those of the model, so comparing them says nothing"
        )
        for kind, one, other in (
            ("first moment", found[name].first, moments.first),
            ("root of the second moment", found[name].second.sqrt(), moments.second.sqrt()),
        ):
            assert one.shape == other.shape, f"{name}: {kind} of shape {tuple(one.shape)}, not {tuple(other.shape)}"
            largest = float(other.abs().max())
            apart = float((one - other).abs().max())
            assert apart <= GRADIENT * largest + noise, (
                f"{name}: {kind} differs by {apart / largest:.1e} of its largest, more than {GRADIENT:.0e}"
            )


def require_equal_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerances: Mapping[str, Tensor]
) -> None:
    """Weights or their averages, each element within its own of `weight_tolerances`."""
    assert found.keys() == expected.keys()
    for weights in (found, expected):
        _require_names(weights, tolerances)
    for name, weight in ((name, expected[name]) for name in tolerances):
        assert found[name].shape == weight.shape, f"{name}: shape {tuple(found[name].shape)}, not {tuple(weight.shape)}"
        apart = (found[name] - weight).abs()
        beyond = apart > tolerances[name] + FLOAT32 * (1 + weight.abs())
        assert not beyond.any(), (
            f"{name}: {int(beyond.sum())} of {weight.numel()} elements differ by more than their gradients' rounding "
            f"errors explain, the worst by {float(apart[beyond].max()):.1e}"
        )


def weight_tolerances(steps: list[dict[str, Moments]], optimizer: OptimizerConfig) -> dict[str, Tensor]:
    """How far each weight may lie from where it was after `steps`, whose moments are given.

    An update is lr x m / (sqrt(v) + eps). An error e of the gradients changes m and sqrt(v) by at most e each, and so
    the update by about lr x 2 e / (sqrt(v) + eps), but never by more than twice its own size. An element that got no
    gradient at all gets none elsewhere either.
    """
    rate = max(optimizer.learning_rate, optimizer.projector_learning_rate, optimizer.tower_learning_rate)
    _, decay = optimizer.betas
    tolerances = {name: torch.zeros_like(moments.first) for name, moments in steps[-1].items()}
    for step, parameters in enumerate(steps, start=1):
        roots = {name: (moments.second / (1 - decay**step)).sqrt() for name, moments in parameters.items()}
        noise = NOISE * _largest(roots.values())
        for name, root in roots.items():
            error = GRADIENT * float(root.max()) + noise
            of_update = (2 * error / (root + optimizer.eps)).clamp(max=2)
            tolerances[name] += rate * torch.where(root > 0, of_update, 0)
    return tolerances


def moments_of_steps(job: JobConfig, names: Sequence[str] = ()) -> list[dict[str, Moments]]:
    """AdamW's moments in these checkpoints of a run, or in all of them, the oldest first."""
    found = []
    for name in names or committed(open_storage(job.run.run_uri)):
        with fetched(job, name) as folder:
            found.append(read_moments(folder))
    return found


def _require_names(found: Mapping[str, Tensor], expected: Collection[str]) -> None:
    """All of `expected`, and beside them only other names of the same tensors: some formats list tied weights twice."""
    missing = sorted(set(expected) - found.keys())
    assert not missing, f"not there: {', '.join(missing)}"
    for other in found.keys() - set(expected):
        assert any(torch.equal(found[other], found[name]) for name in expected), f"{other} is in one of the runs only"


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)
