"""Which build of torch is installed, and whether it is the expected one."""

from __future__ import annotations

import pytest
import torch

from vlmpipe.trainer.distributed.torch_build import TorchBuild, installed_build, require
from vlmpipe.trainer.errors import ExitCode, UserError

CU130 = TorchBuild("cu130", "13.0", (7.5, 8.0, 12.0))


def install(monkeypatch: pytest.MonkeyPatch, cuda: str | None, flags: str) -> None:
    """Let torch say that it is another build."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: flags, raising=False)


def test_a_build_with_cuda_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "13.0", "sm_75 sm_80 sm_120 compute_120")
    assert installed_build() == CU130
    assert (CU130.min_driver, CU130.min_compute_capability) == ("580", "7.5")


def test_a_build_for_cpus_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None, "")
    found = installed_build()
    assert (found.name, found.min_driver, found.min_compute_capability) == ("cpu", "", "")
    require(found, "cpu", "", "")


def test_the_expected_build_passes() -> None:
    require(CU130, "cu130", "580", "7.5")


@pytest.mark.parametrize(
    "expected", [("cpu", "", ""), ("cu126", "525", "5.0"), ("cu130", "570", "7.5"), ("cu130", "580", "8.0")]
)
def test_another_build_or_other_needs_are_an_error(expected: tuple[str, str, str]) -> None:
    with pytest.raises(UserError, match="is the build cu130, for drivers from 580 on") as caught:
        require(CU130, *expected)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert f"container/torch_builds/{expected[0]}.txt" in caught.value.fix
