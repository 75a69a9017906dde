"""Products of processors give torch's results, whoever multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpipe.trainer import cpu_products
from vlmpipe.trainer.models.layers.saved_products import PRODUCTS

LARGE, SMALL = (256, 160, 192), (5, 4, 3)  # rows, inner, columns
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the products that oneDNN makes, on any processor."""
    was_in_use = bool(cpu_products._REGISTERED)
    cpu_products.use_default_products()
    shapes, product = [], cpu_products.product

    def noted(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        result = product(left, right, bias)
        shapes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(cpu_products, "product", noted)
    monkeypatch.setattr(cpu_products, "prefers_onednn", torch.backends.mkldnn.is_available)
    yield shapes
    cpu_products.use_default_products()
    monkeypatch.undo()
    if was_in_use:
        cpu_products.use_fastest_products()


def results(dtype: torch.dtype, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Of every operator that is replaced, on plain, transposed, expanded and sliced matrices."""
    rows, inner, columns = sizes
    noise = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=noise).to(dtype)

    left, right, bias, total = drawn(rows, inner), drawn(inner, columns), drawn(columns), drawn(rows, columns)
    lefts = [left, drawn(inner, rows).t(), drawn(rows, 1).expand(rows, inner), drawn(rows, 2 * inner)[:, ::2]]
    found = [each @ right for each in lefts] + [left @ drawn(columns, inner).t()]
    found += [torch.mm(left, right, out=torch.empty(0, dtype=dtype)), torch.mm(left, right, out=total.clone())]
    found += [torch.addmm(bias, left, right), torch.addmm(bias, left, right, beta=2, alpha=3)]
    found += [
        torch.addmm(total, left, right),
        torch.addmm(total[:, :1], left, right),
        torch.addmm(drawn(1)[0], left, right),
        torch.addmm(drawn(1).expand(columns), left, right),
        torch.addmm(drawn(2 * columns)[::2], left, right),
    ]
    return [*found, total.clone().addmm_(left, right), total.clone().addmm_(left, right, beta=0, alpha=2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [LARGE, SMALL, (0, 4, 5), (4, 0, 5), (4, 5, 0)], ids=str)
def test_replaced_operators_give_torchs_results(
    by_onednn: list[tuple[int, ...]], dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    expected = results(dtype, sizes)
    cpu_products.use_fastest_products()
    for found, wanted in zip(results(dtype, sizes), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # of small whole numbers every sum is exact
        assert found.stride() == wanted.stride()
    uses_onednn = dtype == torch.float32 and sizes == LARGE
    assert len(by_onednn) == (8 if uses_onednn else 0)


def test_gradients_of_linear_layers_agree(by_onednn: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(160, 192), torch.randn(2, 128, 160, requires_grad=True)

    def gradients() -> list[Tensor]:
        outputs = F.silu(layer(inputs))
        return [outputs, *torch.autograd.grad(outputs.square().sum(), [inputs, *layer.parameters()])]

    expected = gradients()
    cpu_products.use_fastest_products()
    torch.testing.assert_close(gradients(), expected, rtol=1e-5, atol=1e-4)
    assert sorted(by_onednn) == [(192, 160), (256, 160), (256, 192)]


def test_torch_says_what_is_wrong_with_matrices(by_onednn: list[tuple[int, ...]]) -> None:
    cpu_products.use_fastest_products()
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(256x160 and 192x160\)"):
        torch.ones(256, 160) @ torch.ones(192, 160)
    with pytest.raises(RuntimeError, match="matrix"):
        torch.mm(torch.ones(3), torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64))


def test_modes_see_the_operators_of_torch(by_onednn: list[tuple[int, ...]]) -> None:
    """Selective checkpointing and counters of FLOPs know products by their names."""

    class Seen(TorchDispatchMode):
        names: list[object] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func)
            return func(*args, **(kwargs or {}))

    cpu_products.use_fastest_products()
    with Seen() as seen:
        torch.ones(256, 160) @ torch.ones(160, 192)
    assert [name for name in seen.names if name in PRODUCTS] == [torch.ops.aten.mm.default]
    assert not [name for name in seen.names if "mkldnn" in str(name)]
    assert by_onednn == [(256, 192)]


def test_default_products_return(by_onednn: list[tuple[int, ...]]) -> None:
    cpu_products.use_fastest_products()
    cpu_products.use_fastest_products()
    assert torch.equal(torch.ones(256, 160) @ torch.ones(160, 192), torch.full((256, 192), 160.0))
    cpu_products.use_default_products()
    assert torch.equal(torch.ones(256, 160) @ torch.ones(160, 192), torch.full((256, 192), 160.0))
    assert len(by_onednn) == 1


@pytest.mark.parametrize(
    ("maker", "width", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_processors_that_multiply_by_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str, width: str, expected: bool
) -> None:
    info = tmp_path / "cpuinfo"
    if maker:
        info.write_text(f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: any\n", encoding="utf-8")
    monkeypatch.setattr(cpu_products, "CPU_INFO", info)
    for library in (torch.backends.mkldnn, torch.backends.mkl):
        monkeypatch.setattr(library, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: width)
    assert cpu_products.prefers_onednn() is expected
