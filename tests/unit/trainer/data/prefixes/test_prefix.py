"""The prefix of a sample, from itself alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.chat.encode import IGNORED, Encoded
from vlmpipe.trainer.data.prefixes.prefix import Prefix, content_of, prefix_of, prefix_of_pair
from vlmpipe.trainer.data.sample import Clip

IMAGE, PHOTO = 9, ("ab" * 32, 24, 24)
TOKENS = st.lists(st.tuples(st.sampled_from([1, 2, IMAGE]), st.booleans()), max_size=12)


def encoded(ids: list[int], labels: list[int]) -> Encoded:
    """labels: places of the tokens that are labels."""
    return Encoded(ids, [token if place in labels else IGNORED for place, token in enumerate(ids)])


@given(TOKENS)
def test_it_holds_all_images_and_ends_before_the_first_label_by_a_token(tokens: list[tuple[int, bool]]) -> None:
    ids = [token for token, _ in tokens]
    labels = [place for place, (token, is_label) in enumerate(tokens) if is_label and token != IMAGE]
    prefix = prefix_of(encoded(ids, labels), [IMAGE], [PHOTO] * (IMAGE in ids))
    if prefix.tokens:
        assert IMAGE not in ids[prefix.tokens :] and ids[prefix.tokens - 1] == IMAGE
        assert prefix.tokens < labels[0]
    else:
        assert prefix == Prefix()


@pytest.mark.parametrize(
    ("ids", "labels"),
    [([1, 2, 3], [2]), ([1, IMAGE, 3], [2]), ([IMAGE, 1, 2, 3, IMAGE, 4], [3]), ([1, IMAGE, 2], [])],
    ids=["no image", "an answer after the image", "an image after an answer", "no label"],
)
def test_such_a_sample_shares_nothing(ids: list[int], labels: list[int]) -> None:
    assert prefix_of(encoded(ids, labels), [IMAGE], [PHOTO] * (IMAGE in ids)) == Prefix()


def test_keys_are_equal_for_equal_tokens_and_images_only() -> None:
    first = prefix_of(encoded([1, IMAGE, IMAGE, 5, 6], [4]), [IMAGE], [PHOTO])
    assert first.tokens == 3 and first == prefix_of(encoded([1, IMAGE, IMAGE, 7, 7, 8], [5]), [IMAGE], [PHOTO])
    other_pixels, other_size = ("cd" * 32, 24, 24), (PHOTO[0], 12, 48)
    keys = [
        prefix_of(encoded(ids, [len(ids) - 1]), [IMAGE], images).key
        for ids, images in [
            ([1, IMAGE, IMAGE, 5, 6], [PHOTO]), ([1, IMAGE, IMAGE, 5, 6], [other_pixels]),
            ([1, IMAGE, IMAGE, 5, 6], [other_size]), ([2, IMAGE, IMAGE, 5, 6], [PHOTO]),
            ([1, IMAGE, 5, 6], [PHOTO]), ([1, IMAGE, IMAGE, 5, 6], [PHOTO, other_pixels]),
            ([1, IMAGE, IMAGE, 5, 6], [other_pixels, PHOTO]),
        ]
    ]  # fmt: skip
    assert len(set(keys)) == len(keys) and keys[0] == first.key


@given(st.lists(st.sampled_from([1, 2, IMAGE]), max_size=6), *[st.lists(st.sampled_from([1, 2]), max_size=4)] * 2)
def test_conversations_of_a_pair_share_what_precedes_their_answers_but_a_token(
    prompt: list[int], chosen: list[int], rejected: list[int]
) -> None:
    pair = [encoded([*prompt, 5, *answer, 6], list(range(len(prompt) + 1, len(prompt) + len(answer) + 2)))
            for answer in (chosen, rejected)]  # fmt: skip
    images = [PHOTO] * (IMAGE in prompt)
    found = prefix_of_pair(*pair, [IMAGE], images)
    alone = prefix_of(pair[0], [IMAGE], images)
    assert found == Prefix(alone.tokens, alone.key, len(prompt)), "the token before an answer predicts it"
    assert found.tokens <= found.pair_tokens


def test_prompts_of_a_pair_that_differ_share_what_is_equal() -> None:
    """As where a tokenizer joins the end of the prompt with the beginning of the answer."""
    pair = encoded([1, IMAGE, 2, 3, 4, 7], [5]), encoded([1, IMAGE, 2, 8, 7], [4])
    assert prefix_of_pair(*pair, [IMAGE], [PHOTO]).pair_tokens == 3
    divided = encoded([1, IMAGE, IMAGE, 4, 7], [4]), encoded([1, IMAGE, 4, 7], [3])
    assert prefix_of_pair(*divided, [IMAGE], [PHOTO]) == Prefix(), "an image would be in parts"
    behind = encoded([1, 2, IMAGE, 7], [3]), encoded([1, 2, IMAGE, 8], [3])
    assert prefix_of_pair(*behind, [IMAGE], [PHOTO]) == Prefix(), "the image predicts the answer"


def test_videos_of_equal_frames_and_other_times_have_other_keys() -> None:
    clips = [None, Clip(2, 0.5), Clip(2, 1.0), Clip(1, 0.5), Clip(2, 0.5)]
    shown = [(content_of(PHOTO[0], clip), *PHOTO[1:]) for clip in clips]
    keys = [prefix_of(encoded([1, IMAGE, IMAGE, 5, 6], [4]), [IMAGE], [image]).key for image in shown]
    assert len(set(keys)) == 4 and keys[1] == keys[4]
