"""Groups of prompts: consecutive, about the same images, with all image tokens in what they share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.shared_prompts.groups import WORTH, PromptGroup, prompt_groups

IMAGE = 9
LONG = [1, *[IMAGE] * 20, 2]


def singles(prompts: list[list[int]]) -> list[PromptGroup]:
    return [PromptGroup(range(place, place + 1), len(prompt) - 1) for place, prompt in enumerate(prompts)]


def test_questions_about_an_image_share_all_that_is_equal() -> None:
    prompts = [[*LONG, 3, 4], [*LONG, 3, 5, 6], [*LONG, 7], [1, 2, 3]]
    assert prompt_groups(prompts, ["a", "a", "b", ""], [IMAGE]) == [
        PromptGroup(range(2), len(LONG) + 1), PromptGroup(range(2, 3), len(LONG)), PromptGroup(range(3, 4), 2),
    ]  # fmt: skip


def test_equal_prompts_keep_a_token_to_go_on_from() -> None:
    prompts = [[*LONG, 3]] * 3
    assert prompt_groups(prompts, ["a"] * 3, [IMAGE]) == [PromptGroup(range(3), len(LONG))]


def test_images_behind_the_question_share_nothing() -> None:
    prompts = [[1, 3, *[IMAGE] * 20, 2], [1, 4, *[IMAGE] * 20, 2]]
    assert prompt_groups(prompts, ["a", "a"], [IMAGE]) == singles(prompts)


def test_other_images_with_equal_tokens_share_nothing() -> None:
    prompts = [[*LONG, 3], [*LONG, 3]]
    assert prompt_groups(prompts, ["a", "b"], [IMAGE]) == singles(prompts)


def test_what_saves_little_is_computed_alone() -> None:
    prompts = [[1, IMAGE, *range(10, 30)], [1, IMAGE, *range(40, 60)]]
    assert WORTH > 2 / 44 and prompt_groups(prompts, ["a", "a"], [IMAGE]) == singles(prompts)


TOKENS = st.sampled_from([1, 2, 3, IMAGE])
PROMPTS = st.lists(st.tuples(st.lists(TOKENS, min_size=2, max_size=12), st.sampled_from("ab")), min_size=1, max_size=8)


@given(PROMPTS)
def test_groups_are_a_partition_that_no_image_crosses(drawn: list[tuple[list[int], str]]) -> None:
    prompts, images = map(list, zip(*drawn, strict=True))
    groups = prompt_groups(prompts, images, [IMAGE])
    assert [place for group in groups for place in group.members] == list(range(len(prompts)))
    for group in groups:
        members = [prompts[place] for place in group.members]
        assert len({images[place] for place in group.members}) == 1
        assert all(prompt[: group.tokens] == members[0][: group.tokens] for prompt in members)
        assert 0 < group.tokens < min(map(len, members))
        if len(members) > 1:
            assert all(IMAGE not in prompt[group.tokens :] for prompt in members)
