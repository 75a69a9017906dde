"""Tokens of conversations are those of the published processors of each family; labels are answers and their ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trainer.chat_templates import TEMPLATES, with_template
from tests.support.trainer.processors import Processor
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import IMAGE_PAD, IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.chat.messages import as_chat, shape_of, texts_of
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import control_tokens, make_tokenizer
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage.local import LocalStorage

SIZES = [(40, 24), (17, 60), (20, 20)]
TURNS = (
    Turn(f"{IMAGE_TOKEN}\n{IMAGE_TOKEN}\nSame?", "No.", system="Be brief."),
    Turn(f"From {IMAGE_TOKEN} to here?", "It\ngrew: 7."),
    Turn("Is it old?", "no"),
)
SHOWN = (Turn("Show two.", f"One: {IMAGE_TOKEN}\nTwo: {IMAGE_TOKEN}"), Turn(f"{IMAGE_TOKEN}\nThis?", "Yes."))
TOWER = {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2, "patch_size": 4}
LLAVA = {
    "tower": {"config": TOWER},
    "language_model": {"config": {"model_type": "qwen2"}},
    "tokenizer": "train:300",
    "image_size": 16,
}
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm", "smolvlm_tiles", "llava"]


def config_of(family: str) -> ModelConfig:
    return ModelConfig.model_validate(LLAVA if family == "llava" else model_section(family))


def chat_of(config: ModelConfig, template: str = "plain", bos: str | None = None) -> Chat:
    form = image_form_of(config)
    source = TEMPLATES[template].replace(IMAGE_PAD, config.image_token)
    tokenizer = with_template(source, image=config.image_token, bos=bos)
    tokenizer.add_special_tokens({"extra_special_tokens": control_tokens(form)}, replace_extra_special_tokens=False)
    return Chat(tokenizer, form, as_text=False)


def processor_of(config: ModelConfig, chat: Chat, patched: pytest.MonkeyPatch) -> Processor:
    images = family_of(config).image_processor(config)
    tile_tokens = 4 if chat.form.published else 0
    return Processor.of(config.family, images, chat.tokenizer, patched, tile_tokens=tile_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bos", [None, "<|turn|>"])
def test_tokens_are_those_of_the_published_processor(
    family: str, bos: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(family)
    chat = chat_of(config, bos=bos)
    processor, count = processor_of(config, chat, monkeypatch), image_tokens_of(config)
    counts = [count(*size) for size in SIZES]
    for turns in (TURNS, SHOWN):
        assert chat.encode(turns, counts, SIZES).input_ids == processor.ids(chat.messages(turns), SIZES)
    asked = (TURNS[0],)
    prompt = chat.messages((Turn(TURNS[0].question, "", system="Be brief."),))
    ids = processor.ids(prompt, SIZES, add_generation_prompt=True)
    assert chat.prompt(asked[0], counts[:2], SIZES[:2]) == ids
    whole = chat.encode(asked, counts[:2], SIZES[:2])
    assert whole.input_ids[: len(ids)] == ids, "training continues the prompt that serving gives"
    assert set(whole.labels[: len(ids)]) == {IGNORED} and whole.labels[len(ids)] != IGNORED
    for number in range(1, len(TURNS)):  # a later turn, after what training has before it
        shown = sum(turn.question.count(IMAGE_TOKEN) for turn in TURNS[: number + 1])
        trained = chat.encode(TURNS[: number + 1], counts[:shown], SIZES[:shown])
        later = chat.prompt(TURNS[number], counts[:shown], SIZES[:shown], TURNS[:number])
        assert later == trained.input_ids[: len(later)] and trained.labels[len(later)] != IGNORED


TEXT = st.text(st.sampled_from("ab 7.,é?\nC:<|"), min_size=1, max_size=12).filter(str.strip)
TURN = st.builds(Turn, TEXT, TEXT.map(str.strip))


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=4), st.sampled_from(["plain", "strips", "blank before answers"]))
def test_labels_are_answers_and_ends_and_no_image(turns: list[Turn], template: str) -> None:
    chat = CHATS.setdefault(template, chat_of(config_of("qwen2_5_vl"), template))
    turns = [Turn(f"{IMAGE_TOKEN}\n{turns[0].question}", turns[0].answer), *turns[1:]]
    chat.verify(chat.messages(turns))
    encoded = chat.encode(turns, [5])
    assert all(label in (IGNORED, token) for label, token in zip(encoded.labels, encoded.input_ids, strict=True))
    labelled = [label for label in encoded.labels if label != IGNORED]
    assert chat.image_token_id not in labelled and encoded.input_ids.count(chat.image_token_id) == 5
    before = " " if template.startswith("blank") else ""
    expected = "".join(f"{before}{turn.answer}<|end|>" for turn in turns)
    assert chat.tokenizer.decode(labelled) == expected


CHATS: dict[str, Chat] = {}


OWN_TEXT = st.text(min_size=1, max_size=12).filter(str.strip) | st.sampled_from(["</think>", "{{ bos_token }}", "{%-"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(Turn, OWN_TEXT, OWN_TEXT, system=st.just("") | OWN_TEXT), min_size=1, max_size=4))
def test_our_own_template_writes_every_text_as_it_is(turns: list[Turn]) -> None:
    """So that `verify` need not render it."""
    chat = CHATS.setdefault("own", Chat(make_tokenizer("train:300", ["What?", "A cat."])))
    turns = [replace(turn, system=turn.system if not number else "") for number, turn in enumerate(turns)]
    messages = chat.messages(turns)
    layout = chat.layout(shape_of(messages))
    rendered = chat.template.render(as_chat(messages, layout.strings))
    assert layout.rendered(list(texts_of(messages))) == rendered
    with patch.object(type(chat.template), "render", side_effect=AssertionError("rendered")):
        chat.verify(messages)


def test_a_token_across_an_answers_boundary_is_refused() -> None:
    """Without the line end before answers, the tokenizer joins the role's letters with an answer's first."""
    template = TEMPLATES["plain"].replace("role }}\n", "role }}").replace("assistant\n", "assistant")
    chat = Chat(with_template(template), as_text=False)
    with pytest.raises(RejectedError, match="straddle"):
        chat.encode([Turn("what?", "s")], [])


def test_a_saved_chat_is_the_same(tmp_path: Path) -> None:
    chat = chat_of(config_of("qwen3_vl"), "no end token")
    chat = Chat(chat.tokenizer, chat.form, added_end="<|end|>", as_text=False)
    chat.save(tmp_path / "tokenizer")
    loaded = Chat.load(LocalStorage(tmp_path), chat.form)
    assert loaded.template == chat.template and loaded.end_token_ids == chat.end_token_ids
    assert loaded.encode(TURNS, [3, 1, 2]) == chat.encode(TURNS, [3, 1, 2])


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@given(contexts=st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=8, deadline=None)
def test_an_answer_that_is_context_has_the_same_tokens_and_no_label(template: str, contexts: list[bool]) -> None:
    chat = chat_of(config_of("llava"), template)
    turns = [Turn(f"{n}?", f"No. {n}", system="Be brief." if not n else "") for n in range(3)]
    try:
        alone = [
            chat.encode([replace(turn, is_context=n != kept) for n, turn in enumerate(turns)], [], [])
            for kept in range(3)
        ]
    except RejectedError:
        return  # a template without a system text or without several turns
    encoded = chat.encode(
        [replace(turn, is_context=is_so) for turn, is_so in zip(turns, contexts, strict=True)], [], []
    )
    learned = [one for one, is_so in zip(alone, contexts, strict=True) if not is_so]
    assert all(one.input_ids == encoded.input_ids for one in alone)
    assert encoded.labels == [
        max((one.labels[place] for one in learned), default=IGNORED) for place in range(len(encoded.input_ids))
    ]
    written = [chat.tokenizer.decode([label for label in one.labels if label != IGNORED]).strip() for one in alone]
    assert all(text.startswith(f"No. {number}") for number, text in enumerate(written))
