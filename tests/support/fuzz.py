"""How many examples a law of damaged input tries: a few in `make test`, many and other ones in `make fuzz-*`.

Tests name the outcome of each example by hypothesis's `event`, and `make fuzz-*` prints how many had which.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

EXAMPLES_VARIABLE = "VLMPIPE_FUZZ_EXAMPLES"
FUZZING = EXAMPLES_VARIABLE in os.environ


def examples(short: int, share: float = 1.0) -> int:
    """So many in `make test`; of those that `make fuzz-*` asks for the share that a test's cost allows."""
    return max(1, int(share * int(os.environ[EXAMPLES_VARIABLE]))) if FUZZING else short


def fuzzed(short: int, share: float = 1.0) -> settings:
    """The same examples each time in `make test`."""
    return settings(
        max_examples=examples(short, share),
        deadline=None,
        derandomize=not FUZZING,
        phases=(Phase.explicit, Phase.generate),  # a failure is small as it is
        suppress_health_check=list(HealthCheck),
    )
