"""Memory of pixel values: taken again when nothing looks at it any more, and never before."""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmpipe.trainer.data.prepare.validation.checks import KEPT_EXTENSION
from vlmpipe.trainer.models import pixels
from vlmpipe.trainer.models.pixels import ValueMemory, decoded
from vlmpipe.trainer.sizing.image_preparation import FREE_BLOCKS


def address(values: np.ndarray) -> int:
    return int(values.__array_interface__["data"][0])


def test_memory_of_a_tensor_that_is_gone_is_taken_again() -> None:
    memory = ValueMemory()
    values = memory.empty(4, 3, 64, 64)
    place, tensor = address(values), torch.from_numpy(values)
    del values
    other = memory.empty(4, 3, 64, 64)
    assert address(other) != place, "the tensor is there"
    del tensor
    assert address(memory.empty(3, 3, 64, 64)) == place, "also for somewhat fewer values"


def test_a_view_holds_on_to_its_memory() -> None:
    memory = ValueMemory()
    values = memory.empty(8, 16)
    place, view = address(values), np.split(values.reshape(4, 2, 16), 2)[1][0, :, 3:]
    view[:] = 7.0
    tensor = torch.from_numpy(values)[6:].clone(), torch.from_numpy(view)
    del values, view
    gc.collect()
    other = memory.empty(8, 16)
    other[:] = 0.0
    assert address(other) != place and tensor[1].unique().tolist() == [7.0]


def test_little_is_kept_free_and_much_is_not_taken_for_little() -> None:
    memory = ValueMemory()
    arrays = [memory.empty(1000 + number) for number in range(6)]
    arrays.clear()
    assert len(memory._free) == FREE_BLOCKS
    small = memory.empty(10)
    assert len(memory._free) == FREE_BLOCKS
    del small
    assert memory.empty(0, 3).shape == (0, 3)


def test_a_forked_process_has_a_copy() -> None:
    """As has any that a loader forks: it must not write into what this one trains on."""
    values = ValueMemory().empty(mmap.PAGESIZE)
    values[:] = 1.0
    child = os.fork()
    if not child:
        values[:] = 2.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (values == 1.0).all()


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40), kept=st.integers(1, 4))
def test_arrays_that_are_there_at_once_never_share_memory(sizes: list[int], kept: int) -> None:
    memory, there = ValueMemory(), list[np.ndarray]()
    for number, size in enumerate(sizes):
        there.append(memory.empty(size))
        there[-1][:] = number
        there = there[-kept:]
        assert all((values == values[0]).all() for values in there)
    assert len({values[0] for values in there}) == len(there)


def test_threads_never_share_memory() -> None:
    memory = ValueMemory()

    def fill(number: int) -> bool:
        values = memory.empty(20_000)
        values[:] = number
        return bool((values == number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(200)))


def test_a_kernel_without_huge_pages_gives_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")  # as of a kernel that was built without them

    monkeypatch.setattr(pixels.mmap, "mmap", Plain)
    assert ValueMemory().empty(2, 3).shape == (2, 3)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_every_format_that_prepared_data_keeps_is_decoded(form: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 7), (200, 10, 10)).save(buffer, form)
    assert form in KEPT_EXTENSION
    assert decoded(buffer.getvalue()).size == (12, 7)
