"""Best fit in one window: each sample goes where it leaves the fewest tokens free.

For few windows, and for those whose samples may not all share a sequence; `side_by_side` does the same for many.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def best_fit(
    tokens: Int64Array, images: Int64Array, budget: tuple[int, int], apart: NDArray[np.integer] | None = None
) -> Int64Array:
    """(samples,) number of each sample's sequence, by the order of the samples.

    apart: (samples,) samples of equal numbers never share a sequence; None: all may.
    """
    # Most of the time of a small plan: nothing is called that need not be. An open sequence is one integer: its free
    # tokens, its number from 1 on, its free images. A sample is another one, whose number is 0: one comparison finds
    # where its tokens fit, and one subtraction puts it there.
    max_images = min(budget[1], int(images.sum()) + 1)  # a limit that is never met may be of any size
    image_bits = max_images.bit_length()
    shift = image_bits + (len(tokens) + 1).bit_length()
    image_mask, one_sequence, one_token = (1 << image_bits) - 1, 1 << image_bits, 1 << shift
    empty = (budget[0] << shift) + max_images
    end = (budget[0] + 1 << shift) + image_mask  # after all open sequences, with room for any sample
    open_sequences, entries = [end], list[int]()  # open sequences are sorted
    groups: list[int] = [] if apart is None else apart.tolist()
    groups_in: dict[int, set[int]] = {}
    for place_of_sample, sample in enumerate(((tokens << shift) + images).tolist()):
        place = bisect_left(open_sequences, sample)
        entry = open_sequences[place]
        while (entry & image_mask) < (sample & image_mask) or (
            groups and groups[place_of_sample] in groups_in.get((entry & one_token - 1) >> image_bits, ())
        ):
            place += 1
            entry = open_sequences[place]
        if entry == end:
            empty += one_sequence
            entry = empty - sample
        else:
            entry = open_sequences.pop(place) - sample
        if groups:
            groups_in.setdefault((entry & one_token - 1) >> image_bits, set()).add(groups[place_of_sample])
        entries.append(entry)
        if entry >= one_token and entry & image_mask:  # free tokens, and images
            insort(open_sequences, entry)
    return ((np.array(entries, np.int64) & one_token - 1) >> image_bits) - 1
