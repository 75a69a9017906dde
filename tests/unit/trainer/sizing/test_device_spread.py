"""Shares of devices that hold an exported model together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.sizing.device_spread import devices_needed, devices_of_layers, fullest_device

GIB = 2**30


def test_a_model_takes_as_few_devices_as_leave_room_for_questions() -> None:
    assert devices_needed(13 * GIB, 22 * GIB, 4) == 1
    assert devices_needed(16 * GIB, 22 * GIB, 4) == 2, "73 % of the first"
    assert devices_needed(132 * GIB, 80 * GIB, 4) == 3
    assert devices_needed(132 * GIB, 80 * GIB, 1) == 1, "no more than there are"


@given(st.integers(0, 900), st.lists(st.integers(1, 50), max_size=80), st.integers(1, 8))
def test_layers_are_in_order_and_no_device_has_more_than_its_share_and_a_layer(
    outside: int, layers: list[int], devices: int
) -> None:
    places = devices_of_layers(outside, layers, devices)
    assert places == sorted(places) and all(0 <= place < devices for place in places) and len(places) == len(layers)
    held, most = fullest_device(outside, layers, devices)
    assert held <= max(outside, (outside + sum(layers)) / devices) + max(layers, default=0)
    assert sum(layers) == 0 or most >= len(layers) / devices
