"""Images that are cut into tiles: as the published processor cuts them, and no more in a row than it may have."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast, SiglipImageProcessorPil, SmolVLMImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm

from tests.support.data.prepared import encode, job_config, run_prepare, write_json
from tests.support.pipelines.run_files import small
from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import picture
from tests.support.trainer.tiny_native import model_section
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.evaluation.held_out.shuffled_images import ShuffledImages
from vlmpipe.trainer.models.image_inputs import Images, join_features
from vlmpipe.trainer.models.image_processor import image_preparer, images_within
from vlmpipe.trainer.models.image_tokens import ImageForm, image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_tiles import ImageTiles
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of

SIDE, EDGE = 16, 48
TEXTS = ["USER: what is this? ASSISTANT:", " 7"]
SIZES = [(20, 20), (40, 16), (16, 40), (300, 7), (7, 300), (48, 48), (49, 47), (1, 1), (130, 90)]
ASKED = ["what is this?", "and this:", " is it\n", "same?\n\n"]


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section("smolvlm", longest_edge=EDGE, **changes))


def tokenizer_of(form: ImageForm) -> PreTrainedTokenizerFast:
    return make_tokenizer("train:400", TEXTS, form)


def published_processor(tokenizer: Any, image_processor: Any, tile_tokens: int, patched: pytest.MonkeyPatch) -> Any:
    """transformers' own, of text and images; what it needs for videos only is not there."""
    patched.setattr(processing_smolvlm, "num2words", str)
    kind = processing_smolvlm.SmolVLMProcessor
    patched.setattr(kind, "check_argument_for_proper_class", lambda self, name, value: type(value))
    return kind(image_processor, tokenizer, None, image_seq_len=tile_tokens)


EDGES = st.tuples(st.integers(3, 17), st.integers(2, 7))


@settings(max_examples=300 if WHOLE else 60, deadline=None)
@example(width=1, height=49, sizes=(7, 7))
@given(width=st.integers(1, 400), height=st.integers(1, 400), sizes=EDGES)
def test_an_image_of_any_size_has_the_rows_and_columns_that_the_librarys_processor_cuts(
    width: int, height: int, sizes: tuple[int, int]
) -> None:
    side, times = sizes
    tiles = ImageTiles(side, side * times, tokens=1)
    processor = SmolVLMImageProcessorPil(
        max_image_size={"longest_edge": side}, size={"longest_edge": side * times}, do_pad=False
    )
    blank = Image.new("RGB", (width, height))
    try:
        cut = processor([[blank]], return_row_col_info=True, return_tensors="np")
    except ValueError:  # of a strip it leaves no pixel
        assert max(width, height) / min(width, height) >= times * side
        assert min(tiles.of(width, height)) == 1
        return
    assert tiles.of(width, height) == (cut["rows"][0][0], cut["cols"][0][0])
    assert tiles.count(width, height) == len(cut["pixel_values"][0]) <= tiles.most
    missing = [token for token in _control_tokens(tiles.mark(width, height)) if token not in tiles.control_tokens]
    assert not missing, "a tokenizer is asked for the tokens of all places"


def _control_tokens(mark: str) -> list[str]:
    return [f"<{part.partition('>')[0]}>" for part in mark.replace(IMAGE_TOKEN, "").split("<")[1:]]


@pytest.mark.parametrize("sizes", [[size] for size in SIZES] + [SIZES[:3], SIZES[3:6], SIZES[6:]], ids=str)
def test_tokens_and_pixels_are_those_of_the_published_processor(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    form, count = image_form_of(config), image_tokens_of(config)
    tokenizer = tokenizer_of(form)
    kept = SmolVLMImageProcessorPil(max_image_size={"longest_edge": SIDE}, size={"longest_edge": EDGE})
    published = published_processor(tokenizer, kept, form.tile_tokens, monkeypatch)
    question = "".join(f"{IMAGE_TOKEN}{ASKED[number % len(ASKED)]}" for number in range(len(sizes)))
    data = [picture(seed, size) for seed, size in enumerate(sizes)]
    opened = [Image.open(io.BytesIO(one)).convert("RGB") for one in data]
    expected = published(
        images=[opened], text=[f"<s>USER: {question} ASSISTANT:"], add_special_tokens=False, return_tensors="pt"
    )
    counts = [count(*size) for size in sizes]
    assert Chat(tokenizer, form).prompt(Turn(question, ""), counts, sizes) == expected["input_ids"][0].tolist()
    whole = Chat(tokenizer, form).encode([Turn(question, "yes")], counts, sizes).input_ids
    assert whole[: expected["input_ids"].shape[1]] == expected["input_ids"][0].tolist()
    made = image_preparer(config)(data)
    assert torch.equal(made.values, expected["pixel_values"][0])
    assert made.tiles == tuple(tokens // form.tile_tokens for tokens in counts)


def test_the_export_says_how_images_were_cut(tmp_path: Path) -> None:
    family_of(config_of()).image_processor(config_of()).save_pretrained(tmp_path)
    loaded = SmolVLMImageProcessorPil.from_pretrained(tmp_path)
    assert (loaded.do_image_splitting, loaded.do_resize) == (True, True)
    assert (loaded.size["longest_edge"], loaded.max_image_size["longest_edge"]) == (EDGE, SIDE)


def test_a_prompt_of_the_tokenizers_template_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor writes tiles in the place of each `<image>`: with marks around it, these would be there twice."""
    config = config_of()
    form = image_form_of(config)
    tokenizer = tokenizer_of(form)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this?"}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    processor = published_processor(tokenizer, family_of(config).image_processor(config), form.tile_tokens, monkeypatch)
    image = Image.new("RGB", (40, 16))
    found = processor(images=[[image]], text=[text], add_special_tokens=False)["input_ids"][0]
    counts = [image_tokens_of(config)(40, 16)]
    asked = Turn(f"{IMAGE_TOKEN}\nwhat is this?", "")
    assert list(found) == Chat(tokenizer, form).prompt(asked, counts, [(40, 16)])


def test_a_tokenizer_without_a_place_of_a_tile_is_refused(tmp_path: Path) -> None:
    fewer, more = (ImageForm(is_in_tokenizer=True, tiles=ImageTiles(16, edge, 4)) for edge in (32, 64))
    tokenizer_of(fewer).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks <row_1_col_3>, <row_1_col_4>, <row_2_col_3>, .* and 8 more"):
        make_tokenizer(str(tmp_path), [], more)
    make_tokenizer(str(tmp_path), [], fewer)


def test_features_of_an_image_are_those_of_its_tiles_one_after_another() -> None:
    encoded = torch.arange(30.0).view(5, 3, 2)  # (tiles, patches, width)
    each = Images(torch.empty(5), tiles=(3, 2)).features_of_each(encoded)
    assert [one.shape for one in each] == [(9, 2), (6, 2)]
    assert torch.equal(join_features(each, (3, 2)), encoded)
    assert torch.equal(join_features(each[1:], (3, 2)), encoded[3:])


@pytest.mark.parametrize(("most", "images"), [(64, 6), (10, 1), (3, 1)])
def test_so_many_images_are_encoded_at_once_and_kept_in_a_file_as_have_so_many_tiles(most: int, images: int) -> None:
    """An image has at most 3 x 3 tiles and the whole."""
    assert images_within(config_of(), most) == images
    assert images_within(ModelConfig.model_validate(model_section("smolvlm")), most) == most


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, str]:
    """Squares, of 10 tiles each, wide images, of 4, and a sample of two squares: more than the 12 of a row."""
    folder = tmp_path_factory.mktemp("tiles")
    records = []
    for number in range(12):
        size = (20, 20) if number % 3 else (60, 10)
        names = [f"{number}-{place}.png" for place in range(2 if number == 5 else 1)]
        for place, name in enumerate(names):
            (folder / name).write_bytes(encode(Image.new("RGB", size, (number, place, 0))))
        turns = [{"from": "human", "value": "<image>\n" * len(names) + "What?"}, {"from": "gpt", "value": f"{number}"}]
        records.append({"id": f"{number:02}", "split": "train", "image": names, "conversations": turns})
    records[0]["split"] = "eval"
    source = write_json(folder / "records.json", records)
    base = job_config(
        folder / "root", source=str(source), image_folder=str(folder), sequence_length=512, max_images_per_sequence=12,
        max_reject_fraction=0.5,
    )  # fmt: skip
    config = base.model_copy(update={"model": config_of(tokenizer="train:400")})
    return config, run_prepare(config).uri


def test_a_sample_of_more_tiles_than_a_row_may_have_is_rejected_in_a_sentence(prepared: tuple[JobConfig, str]) -> None:
    rejects = open_storage(prepared[1]).read("rejects.jsonl").decode()
    assert rejects.count("\n") == 1
    assert (
        "2 images in 20 tiles, more than data.max_images_per_sequence 12" in rejects
        and "conv.too_many_images" in rejects
    )


def sequences_of(prepared: tuple[JobConfig, str]) -> Iterator[tuple[PackedSequence, int]]:
    """The rows of an epoch, and the image tokens in each."""
    config, uri = prepared
    split, form = Index.load(uri).split("train"), image_form_of(config.model)
    sequence = PackedBatchSampler(
        split,
        DataConfig(source="unused.json", sequence_length=512, max_images_per_sequence=12),
        seed=0,
        global_batch_size=4,
        tile_tokens=form.tile_tokens,
    )
    reader, chat = ShardReader.open(open_storage(uri)), Chat.load(open_storage(uri), form)
    loader = PackedLoader(split, sequence, chat, reader, images=True)
    for step in range(sequence.num_steps(1)):
        for row in loader.sequences_for_step(step, 0, 1):
            yield row, int((row.input_ids == chat.image_token_id).sum())


def test_a_row_has_no_more_tiles_than_it_may(prepared: tuple[JobConfig, str]) -> None:
    """Rows have room for all samples' tokens, and for more of their images."""
    config, uri = prepared
    split, form = Index.load(uri).split("train"), image_form_of(config.model)
    prepare, seen = image_preparer(config.model), []
    for row, image_tokens in sequences_of(prepared):
        tiles = prepare(row.images).tiles or ()
        assert sum(tiles) == row.tiles == image_tokens // form.tile_tokens <= 12
        seen.append(row.tiles)
    assert sum(seen) == split.tiles(form.tile_tokens).sum() and max(seen) > 10, "rows hold several images"
    stats = open_storage(uri).read("stats.json").decode()
    assert f'"packed_sequences": {len([tiles for tiles in seen if tiles])}' in stats


def test_rows_that_are_traced_and_weighed_have_the_tiles_of_rows_that_are_read(
    prepared: tuple[JobConfig, str],
) -> None:
    model = prepared[0].model
    for row, image_tokens in sequences_of(prepared):
        as_read = image_preparer(model)(row.images).values
        inputs = inputs_of(model, SequenceShape(1, 512, row.tiles, row.label_tokens), 400, cached=False)
        assert inputs["images"].shape == as_read.shape
        assert inputs["input_ids"].count_nonzero() == image_tokens


def test_a_plan_without_data_takes_each_image_for_as_many_tiles_as_its_sample_has_room_for() -> None:
    shape = family_of(config_of()).shape(config_of())
    assert (shape.image_tokens, shape.max_tiles) == (4, 10)
    long, short = (
        Workload.assumed(small(plan={"samples": 100, "sample_tokens": tokens, "sample_images": 2}), shape)
        for tokens in (200, 24)
    )
    assert long.images_per_sequence / long.samples_per_sequence == pytest.approx(20)
    assert short.images_per_sequence / short.samples_per_sequence == pytest.approx(6)
    assert "at most 10 tiles" in long.origin


@pytest.mark.parametrize(
    ("sequence_length", "max_images_per_sequence", "state"), [(256, 64, "ok"), (40, 64, "failed"), (256, 9, "failed")]
)
def test_check_says_whether_the_largest_image_fits_into_a_row(
    sequence_length: int, max_images_per_sequence: int, state: str
) -> None:
    model = model_section("smolvlm", longest_edge=EDGE)
    config = small(
        model=model, data__sequence_length=sequence_length, data__max_images_per_sequence=max_images_per_sequence
    )
    found = [each for each in check_run(config) if each.subject == "image tokens"]
    assert [each.state for each in found] == [state]
    assert "at most 40 per image, in 10 tiles of 4" in found[0].text


def test_another_samples_image_is_cut_as_the_questions_own() -> None:
    """Else the text would say of two rows of three tiles that they are three rows of two."""
    sizes = [(60, 40), (66, 44), (40, 60), (44, 66)]

    class Split:
        def __len__(self) -> int:
            return len(sizes)

        def image_token_counts(self, number: int) -> list[int]:
            return [28]

        def image_sizes(self, number: int) -> list[tuple[int, int]]:
            return [sizes[number]]

        def image_sha256(self, number: int) -> list[str]:
            return [str(number)]

    form = image_form_of(config_of())
    tiled, whole = (ShuffledImages(Split(), None, one) for one in (form, ImageForm()))  # type: ignore[arg-type]
    assert [tiled.partner(number) for number in range(4)] == [1, 0, 3, 2]
    assert [whole.partner(number) for number in (0, 1)] == [2, 3]


def test_a_processor_that_cuts_by_another_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = type("Family", (), {"image_processor": lambda self, config: SiglipImageProcessorPil()})()
    monkeypatch.setattr("vlmpipe.trainer.models.image_processor.family_of", lambda config: family)
    with pytest.raises(ConfigError, match=r"is a SiglipImageProcessorPil, whose tiles are not known here"):
        image_preparer(config_of())
