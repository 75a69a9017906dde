"""Turns to tokens: labels, prompts and the chat template agree, for more than one kind of tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import (
    CHAT_TEMPLATE,
    FOLDER,
    GENERAL_CLASS,
    MAX_TRAINING_CHARS,
    covers,
    load_tokenizer,
    make_tokenizer,
    training_texts,
)
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import ImageForm
from vlmpipe.trainer.storage.local import LocalStorage

TURNS = (
    Turn("<image>\nwhat is the left digit?", "7", "left_digit"),
    Turn("is it even?", "no", "even"),
    Turn("what is the sum?", "15", "sum"),
)
TEXTS = [text for turn in TURNS for text in (f"USER: {turn.question} ASSISTANT:", f" {turn.answer}")] * 10


def byte_level() -> PreTrainedTokenizerFast:
    return make_tokenizer("train:400", TEXTS)


def space_marking() -> PreTrainedTokenizerFast:
    """Like Llama's: spaces become marks, the first word of a text gets one, and control tokens are its own."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<bos>", "<eos>", IMAGE_TOKEN])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


TOKENIZERS = {"byte_level": byte_level(), "space_marking": space_marking()}
BOTH = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
PLAIN_TEXT = st.text(st.sampled_from("ab 7.,é?\nUSERx:"), min_size=1, max_size=12).map(str.strip).filter(bool)


@BOTH
def test_a_saved_tokenizer_of_the_general_class_loads_as_transformers_loads_it(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / FOLDER)
    loaded, theirs = load_tokenizer(LocalStorage(tmp_path)), AutoTokenizer.from_pretrained(tmp_path / FOLDER)
    assert type(loaded) is type(theirs) and type(loaded).__name__ == GENERAL_CLASS
    assert {**loaded.init_kwargs, "name_or_path": ""} == {**theirs.init_kwargs, "name_or_path": ""}
    assert loaded.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (loaded.chat_template, loaded.special_tokens_map) == (theirs.chat_template, theirs.special_tokens_map)


def through_template(messages: list[dict[str, Any]], tokenizer: Any, counts: list[int], **options: Any) -> list[int]:
    """What a user of the exported tokenizer gets: rendered, tokenized, image marks expanded."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    remaining = iter(counts)
    ids = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        ids += [token] * (next(remaining) if token == image_token else 1)
    return ids


def messages_of(turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    return [
        message
        for turn in turns
        for message in (
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        )
    ]


def asked(question: str, counts: list[int], tokenizer: Any) -> list[int]:
    return Chat(tokenizer).prompt(Turn(question, ""), counts)


@BOTH
def test_labels_are_the_answers_and_their_ends(tokenizer: Any) -> None:
    encoded = Chat(tokenizer).encode(TURNS, [5])
    assert len(encoded.input_ids) == len(encoded.labels)
    said = tokenizer.decode([label for label in encoded.labels if label != IGNORED])
    end = tokenizer.eos_token
    assert said.replace(" ", "") == f"7{end}no{end}15{end}"
    assert all(label in (IGNORED, token) for label, token in zip(encoded.labels, encoded.input_ids, strict=True))
    assert encoded.label_tokens == sum(label != IGNORED for label in encoded.labels)


@BOTH
def test_an_image_mark_becomes_its_own_number_of_tokens(tokenizer: Any) -> None:
    turns = (Turn("<image>\n<image>\nsame?", "no"), Turn("and <image>?", "no"))
    ids = Chat(tokenizer).encode(turns, [3, 1, 2]).input_ids
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    lengths = [len(run) for run in "".join("i" if i == image_token else " " for i in ids).split()]
    assert lengths == [3, 1, 2]


@BOTH
@given(st.lists(st.tuples(PLAIN_TEXT, PLAIN_TEXT), min_size=1, max_size=4), st.integers(1, 4))
def test_the_chat_template_gives_the_tokens_of_training(
    tokenizer: Any, texts: list[tuple[str, str]], count: int
) -> None:
    turns = tuple(Turn(question, answer) for question, answer in texts)
    turns = (Turn(f"<image>\n{turns[0].question}", turns[0].answer), *turns[1:])
    assert through_template(messages_of(turns), tokenizer, [count]) == Chat(tokenizer).encode(turns, [count]).input_ids


@BOTH
def test_a_prompt_is_how_training_begins(tokenizer: Any) -> None:
    ids = asked(TURNS[0].question, [5], tokenizer)
    whole = Chat(tokenizer).encode(TURNS, [5])
    assert whole.input_ids[: len(ids)] == ids
    assert whole.labels[: len(ids)] == [IGNORED] * len(ids)
    assert whole.labels[len(ids)] != IGNORED


@BOTH
def test_the_template_makes_the_same_prompt(tokenizer: Any) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what is the left digit?"}]
    ids = through_template([{"role": "user", "content": content}], tokenizer, [5], add_generation_prompt=True)
    assert ids == asked(TURNS[0].question, [5], tokenizer)


def test_a_later_turn_is_asked_with_the_images_in_front() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert asked("is it even?", [2], tokenizer) == asked("<image>\nis it even?", [2], tokenizer)
    assert tokenizer.decode(asked("<image>\nis it even?", [], tokenizer)) == "<s>USER: is it even? ASSISTANT:"


@BOTH
def test_an_image_in_an_answer_is_no_label(tokenizer: Any) -> None:
    chat = Chat(tokenizer)
    encoded = chat.encode([Turn("which?", "<image>\nthis")], [3])
    assert encoded.input_ids.count(chat.image_token_id) == 3 and chat.image_token_id not in encoded.labels
    assert tokenizer.decode([label for label in encoded.labels if label != IGNORED]).split() == [
        "this" + tokenizer.eos_token
    ]


def test_short_answers_are_one_token() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    for answer in ("7", "no", "15"):
        encoded = Chat(tokenizer).encode((Turn("what?", answer),), [])
        assert encoded.label_tokens == 2, answer  # the answer and the end


def test_training_a_tokenizer_is_deterministic() -> None:
    texts = [f"word{n % 13} and {n * 7919 % 31}" for n in range(500)]
    first, second = make_tokenizer("train:400", texts), make_tokenizer("train:400", texts)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_a_saved_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(LocalStorage(tmp_path))
    assert loaded.chat_template == CHAT_TEMPLATE
    assert Chat(loaded).encode(TURNS, [5]) == Chat(tokenizer).encode(TURNS, [5])
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == ("<pad>", "<s>", "</s>")


def test_pretrained_tokenizer_gets_missing_tokens(tmp_path: Path) -> None:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = make_tokenizer(str(tmp_path), [])
    assert tokenizer.eos_token == "<end>" and tokenizer.pad_token == "<pad>"
    encoded = Chat(tokenizer).encode(TURNS, [4])
    assert encoded.input_ids.count(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)) == 4
    assert through_template(messages_of(TURNS), tokenizer, [4]) == encoded.input_ids


def test_tokenizer_without_the_models_image_tokens_is_refused(tmp_path: Path) -> None:
    bare = make_tokenizer("train:400", TEXTS)
    bare.save_pretrained(tmp_path)
    mark = f"<around><whole>{IMAGE_TOKEN}<around>"
    with pytest.raises(ConfigError, match=r"model.tokenizer .* lacks <around>, <whole>, which the model sees"):
        make_tokenizer(str(tmp_path), [], ImageForm(mark, is_in_tokenizer=True))
    made = make_tokenizer(str(tmp_path), [], ImageForm(mark))
    assert made.convert_tokens_to_ids(["<around>", "<whole>"]) == [len(bare), len(bare) + 1]
    made.save_pretrained(tmp_path)
    assert len(make_tokenizer(str(tmp_path), [], ImageForm(mark, is_in_tokenizer=True))) == len(made)


def test_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        make_tokenizer(str(tmp_path / "nothing"), [])
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["train:", "train:many", "train:259", "train:-1"])
def test_a_wrong_vocabulary_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        make_tokenizer(name, TEXTS)


@pytest.mark.parametrize("lacking", ["missing", "a folder", "no entries"])
def test_a_tokenizer_that_would_be_empty_is_refused(tmp_path: Path, lacking: str) -> None:
    """transformers makes an empty one where the file is missing: each text would become nothing."""
    TOKENIZERS["byte_level"].save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.unlink()
    if lacking == "a folder":
        file.mkdir()
    if lacking == "no entries":
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json|in 0 tokens") as refused:
        make_tokenizer(str(tmp_path), [])
    assert "copy all files of the tokenizer" in str(refused.value.fix)


@pytest.mark.parametrize("size", range(5, 100, 5))
def test_a_truncated_tokenizer_is_refused(tmp_path: Path, size: int) -> None:
    TOKENIZERS["byte_level"].save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) * size // 100])
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        make_tokenizer(str(tmp_path), [])


def test_a_tokenizer_that_drops_letters_is_refused(tmp_path: Path) -> None:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bare.train_from_iterator(["what is this"], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="decode to"):
        make_tokenizer(str(tmp_path), [])


def test_characters_without_a_token_are_lost_and_joined_ones_are_not() -> None:
    chat = Chat(TOKENIZERS["space_marking"])
    assert chat.encode([Turn("what is the sum?", "15 \u4e2d\u6587 \U0001f600")], []).lost == "\u4e2d\u6587\U0001f600"
    assert chat.encode(TURNS, [2]).lost == ""
    assert chat.has_tokens("15 \u4e2d") and not chat.has_tokens("\u4e2d\u6587") and chat.has_tokens(" ")
    joining = make_tokenizer("train:400", TEXTS)
    joining.backend_tokenizer.normalizer = normalizers.NFC()
    assert Chat(joining).encode([Turn("cafe\u0301 \u1100\u1161\u11a8", "\u4e2d")], []).lost == ""


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_a_tokenizer_of_bytes_loses_nothing(text: str) -> None:
    assert Chat(TOKENIZERS["byte_level"]).encode([Turn("what?", text)], [1] * text.count(IMAGE_TOKEN)).lost == ""


@given(st.text(" ab", max_size=6), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), max_size=5))
def test_tokens_cover_a_text_whatever_their_order(text: str, places: list[list[int]]) -> None:
    """Compared with a set of characters: tokens may overlap, be empty, and leave white space out."""
    offsets = sorted((min(start, len(text)), min(stop, len(text))) for start, stop in places)
    covered = {place for start, stop in offsets for place in range(start, stop)}
    left_out = {place for place in range(len(text)) if place not in covered and not text[place].isspace()}
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    assert covers(text, starts, stops) == (not left_out)


def test_a_tokenizer_learns_from_the_beginning_of_a_text_that_cannot_fit() -> None:
    """A Parquet page of some kilobytes may hold a text of 200 MB."""
    turn = Turn("q" * (3 * MAX_TRAINING_CHARS), "a" * (3 * MAX_TRAINING_CHARS))
    assert all(len(text) < MAX_TRAINING_CHARS + 100 for text in training_texts([turn]))
