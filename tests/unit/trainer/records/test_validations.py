"""The best step and patience are those of the whole sequence of values, wherever it was interrupted."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.records.commit import parse_commit
from vlmpipe.trainer.records.validations import HIGHER_IS_BETTER, Validations

METRICS = ("validation_loss", *HIGHER_IS_BETTER)
VALUES = st.lists(st.one_of(st.integers(0, 6).map(float), st.sampled_from([math.nan, math.inf])), min_size=1)


def restarted(state: Validations) -> Validations:
    """The state as a COMMIT holds it."""
    read = parse_commit(record(validations=state).text(), "one").validations
    assert read is not None
    return read


@given(metric=st.sampled_from(METRICS), values=VALUES, least=st.sampled_from([0.0, 1.0]), data=st.data())
def test_states_are_those_of_the_whole_sequence(
    metric: str, values: list[float], least: float, data: st.DataObject
) -> None:
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    state, saved = Validations(metric, 100), dict[int, float]()
    reference, waited = math.inf, 0
    for step, value in enumerate(values, start=1):
        state = state.counted(step, value, min_improvement=least)
        if data.draw(st.booleans()):  # saved before it was validated, and known to be committed
            state = state.committed(f"checkpoint-{step}", step)
            saved |= {step: sign * value} if math.isfinite(value) else {}
        if data.draw(st.booleans()):  # killed: the newest validation is counted once more
            state = restarted(state).counted(step, value, min_improvement=least)
        better = math.isfinite(value) and sign * value < reference - least
        reference, waited = (sign * value, 0) if better else (reference, waited + 1)
        assert (state.step, state.waited) == (step, waited)
    finite = {step: sign * value for step, value in enumerate(values, start=1) if math.isfinite(value)}
    assert state.best_step == min(finite, key=finite.__getitem__, default=0)
    assert state.saved == (f"checkpoint-{min(saved, key=saved.__getitem__)}" if saved else "")


def test_a_step_whose_save_failed_is_not_the_one_that_is_kept() -> None:
    state = Validations("validation_loss", 100).counted(1, 0.5).committed("first", 1).counted(2, 0.1)
    state = state.committed("first", 1).counted(3, 0.3).committed("third", 3)
    assert (state.best_step, state.saved, state.saved_value, state.pending) == (2, "third", 0.3, ())
