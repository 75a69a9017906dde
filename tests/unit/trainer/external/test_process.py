"""The environment of a training program."""

from __future__ import annotations

import pytest

from trainer.config.external_trainer import ExternalTrainerConfig
from trainer.distributed.cluster_env import Cluster
from trainer.external.process import Node, environment


def test_a_script_may_import_the_modules_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps run with PYTHONSAFEPATH, which no image sets."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    trainer = ExternalTrainerConfig(name="mine", command=("python", "train.py"))
    assert "PYTHONSAFEPATH" not in environment(trainer, Node(Cluster(("localhost:2222",), 0), 1), {})
