"""The staged incidents are named right. All of them: make incidents, or make test-whole."""

from __future__ import annotations

import pytest

from tests.incidents.staged import INCIDENTS
from tests.incidents.table import staged
from tests.support.short_form import WHOLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
QUICK = ("records are not those of any known format",)


@pytest.mark.parametrize("name", [name for name in INCIDENTS if WHOLE or name in QUICK])
def test_an_incident_is_named(name: str) -> None:
    is_right, said, _ = staged(INCIDENTS[name])
    assert is_right, said
