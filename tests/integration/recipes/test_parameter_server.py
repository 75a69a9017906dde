"""recipes/parameter-server in processes of its own: torch RPC, a worker killed, a slow worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainer.server_groups import Group


@pytest.mark.slow
@pytest.mark.parametrize("kill", [(-1, -1), (1, 5)], ids=["straight", "a-worker-killed"])
def test_synchronous_weights_equal_those_of_ddp(tmp_path: Path, kill: tuple[int, int]) -> None:
    expected, _ = Group(steps=12, ddp=True).run(tmp_path, "ddp")
    weights, _ = Group(steps=12, kill=kill).run(tmp_path, "servers")
    assert (tmp_path / "servers.killed").exists() == (kill[0] >= 0)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_slow_worker_is_never_further_behind_than_the_bound(tmp_path: Path) -> None:
    _, measured = Group(steps=20, staleness=3, slow=1, slow_s=0.2).run(tmp_path, "servers")
    assert measured["max_ahead"] == 3
    assert measured["updates"] > 20 - 3
