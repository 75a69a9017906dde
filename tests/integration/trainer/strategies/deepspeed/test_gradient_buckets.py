"""DDP's buckets where CLUSTER_SPEC names reducers, and where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.drivers.ddp_buckets import MARK, MATRICES, STEPS, WIDTH
from tests.support.trainer.runs import run_ranks

MIB = 2**20

CLUSTER_SPEC = {
    "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"], "workerpool2": ["c:2222", "d:2222"]},
    "task": {"type": "workerpool0", "index": 0},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER_SPEC", json.dumps(CLUSTER_SPEC))
        said = run_ranks("tests.support.drivers.ddp_buckets", [], processes=2)
    line = next(line for line in said.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


def test_buckets_are_of_64_mib_where_there_are_reducers_and_torchs_own_elsewhere(found: dict[str, Any]) -> None:
    assert found["reducers"] == 2
    assert found["with"]["cap_bytes"] == 64 * MIB
    assert found["without"]["cap_bytes"] == 25 * MIB
    all_bytes, matrix_bytes = 4 * MATRICES * WIDTH**2, 4 * WIDTH**2
    assert found["with"]["sizes"] == [64 * MIB, all_bytes - 64 * MIB]
    # torch's first bucket is smaller, and the last gradient of a bucket may go beyond.
    assert found["without"]["sizes"][:3] == [matrix_bytes, 28 * MIB, 28 * MIB]


def test_the_size_of_buckets_changes_no_loss(found: dict[str, Any]) -> None:
    of_reducers, plain = found["with"]["losses"], found["without"]["losses"]
    assert len(plain) == STEPS and plain[-1] != pytest.approx(plain[0], rel=1e-4)
    assert of_reducers == pytest.approx(plain, rel=1e-6)
