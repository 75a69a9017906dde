"""A machine that is gone closes no connection. Here its process is stopped, which leaves its sockets as they are."""

from __future__ import annotations

import pytest

from tests.support.trainer.runs import ends_of_ranks
from vlmpipe.trainer.errors import ExitCode


@pytest.mark.slow
def test_the_other_node_ends_and_names_the_one_that_is_gone() -> None:
    codes, said = ends_of_ranks("tests.support.drivers.vanish", [], processes=1, nodes=2, timeout_s=60)
    assert codes[0] == ExitCode.UNEXPECTED, said
    assert "no sign of life for 2 s from node 1 (saving step 7)" in said[0]
