"""The loader: whatever the world size and wherever it starts, a step holds the same rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.prepared import (
    conversation,
    job_config,
    llava_folder,
    preferring,
    prepare_llava,
    run_prepare,
    write_json,
)
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage import open_storage

ROW_TOKENS, GLOBAL_BATCH = 256, 3


class Fixture:
    """Prepared data of 40 samples of unlike length, one of them without an image, and loaders over it."""

    def __init__(self, folder: Path) -> None:
        images, records = llava_folder(folder, 40)
        for number, line in enumerate(records):
            line["conversations"] += conversation("More?", "word " * (number % 9 + 1))
        records.append({"id": "text", "split": "train", "conversations": conversation("No image?", "None.")})
        source = write_json(folder / "data.json", records)
        config = job_config(folder / "root", source=str(source), image_folder=str(images), sequence_length=ROW_TOKENS)
        self.uri = run_prepare(config).uri
        self.storage = open_storage(self.uri)
        self.split: SplitIndex = Index.load(self.uri).split("train")
        self.chat = Chat.load(self.storage, SQUARES)

    def sequence(self, **options: Any) -> PackedBatchSampler:
        order = {name: options.pop(name, value) for name, value in (("seed", 3), ("global_batch_size", GLOBAL_BATCH))}
        data = {"source": "unused.json", "sequence_length": ROW_TOKENS, "max_images_per_sequence": 8}
        return PackedBatchSampler(self.split, DataConfig.model_validate(data | options), **order)

    def loader(self, *, images: bool = False, **options: Any) -> PackedLoader:
        reader = ShardReader.open(self.storage)
        sequence = self.sequence(**options)
        return PackedLoader(self.split, sequence, self.chat, reader, images=images)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("loader"))


def content(row: PackedSequence) -> tuple[Any, ...]:
    return (row.sample_ids, row.input_ids.tolist(), row.labels.tolist(), row.image_sha256, row.tokens)


def test_a_step_has_the_same_rows_whatever_the_world_size(data: Fixture) -> None:
    def rows(world_size: int, step: int) -> list[tuple[Any, ...]]:
        by_rank = []
        for rank in range(world_size):
            loader = data.loader()
            by_rank.append(loader.sequences_for_step(step, rank, world_size))
        assert len({len(of_rank) for of_rank in by_rank}) == 1, "every rank makes as many micro steps"
        dealt = [of_rank[turn] for turn in range(len(by_rank[0])) for of_rank in by_rank]
        return [content(row) for row in dealt if row.sample_ids]

    for step in range(data.sequence().num_steps(2)):
        alone = rows(1, step)
        assert alone and all(rows(world_size, step) == alone for world_size in (2, 3, 5))


def test_each_sample_is_read_once_an_epoch(data: Fixture) -> None:
    sequence = data.sequence()
    steps = sequence.num_steps(1)
    loader = data.loader()
    for epoch in range(2):
        first = sequence.num_steps(epoch)
        rows = [row for step in range(first, first + steps) for row in loader.sequences_for_step(step, 0, 1)]
        seen = Counter(identity for row in rows for identity in row.sample_ids)
        assert seen == Counter(data.split.ids)


@pytest.mark.parametrize("max_steps", [1, 2, 3, 1000])
def test_epochs_behind_the_last_step_are_not_planned(
    data: Fixture, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, planned = 3, list[int]()
    steps = data.sequence().num_steps(epochs)
    limited, plan = data.sequence(), PackedBatchSampler.plan
    monkeypatch.setattr(PackedBatchSampler, "plan", lambda self, epoch: planned.append(epoch) or plan(self, epoch))
    assert limited.num_steps(epochs, max_steps=max_steps) == min(steps, max_steps)
    assert planned[-1] == limited.batch(min(steps, max_steps) - 1).epoch


def test_epochs_have_unlike_orders(data: Fixture) -> None:
    sequence = data.sequence()
    assert sequence.plan(0).digest() != sequence.plan(1).digest()


@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=6), batch=st.integers(1, 5), world_size=st.integers(1, 4))
def test_one_integer_is_the_whole_state(rows: list[int], batch: int, world_size: int) -> None:
    """Walking from any saved `sequences_consumed` meets the same batches as never having stopped."""

    class Planned(PackedBatchSampler):
        def __init__(self) -> None:
            self.global_batch_size = batch

        def num_sequences(self, epoch: int) -> int:
            return rows[epoch % len(rows)]

    sequence = Planned()
    straight = [sequence.batch(step) for step in range(12)]
    for step, here in enumerate(straight):
        resumed = [sequence.batch_at(here.sequences_consumed)]
        while len(resumed) < len(straight) - step:
            resumed.append(sequence.batch_at(resumed[-1].sequences_consumed + len(resumed[-1])))
        assert resumed == straight[step:]
        assert 0 < len(here) <= batch and here.stop <= rows[here.epoch % len(rows)]
        dealt = [here.sequences_of(rank, world_size) for rank in range(world_size)]
        assert sorted(row for ranks in dealt for row in ranks if row is not None) == list(range(here.start, here.stop))


def test_resuming_at_a_step_equals_continuing(data: Fixture) -> None:
    steps = data.sequence().num_steps(2)
    loader = data.loader()
    straight = [[content(row) for row in loader.sequences_for_step(step, 1, 2)] for step in range(steps)]
    for start in (1, steps // 2, steps - 1):
        resumed = data.loader()
        rest = [[content(row) for row in resumed.sequences_for_step(step, 1, 2)] for step in range(start, steps)]
        assert rest == straight[start:]


def test_label_tokens_of_a_step_are_known_without_reading(data: Fixture) -> None:
    loader = data.loader()
    for step in range(data.sequence().num_steps(2)):
        rows = loader.sequences_for_step(step, 0, 1)
        assert loader.sampler.label_tokens(loader.sampler.batch(step)) == sum(row.label_tokens for row in rows)
        assert all(row.label_tokens == int((row.labels != IGNORED).sum()) for row in rows)


def test_a_row_is_its_samples_one_after_another(data: Fixture) -> None:
    reader, number_of = ShardReader.open(data.storage), {identity: n for n, identity in enumerate(data.split.ids)}
    loader = data.loader(images=True)
    row = next(row for row in loader.sequences_for_step(0, 0, 1) if len(row.sample_ids) > 1)
    start, images = 0, []
    for identity in row.sample_ids:
        place = data.split.sample_location(number_of[identity])
        counts = data.split.image_token_counts(number_of[identity])
        encoded = data.chat.encode(reader.turns(place), counts)
        stop = start + len(encoded.input_ids)
        assert row.input_ids[start:stop].tolist() == encoded.input_ids
        assert row.labels[start:stop].tolist() == encoded.labels
        assert row.position_ids[start:stop].tolist() == list(range(stop - start))
        start, images = stop, images + reader.images(place)
    assert row.tokens == start
    assert list(row.images) == images
    assert set(row.input_ids[start:].tolist()) <= {data.chat.tokenizer.pad_token_id}
    assert set(row.labels[start:].tolist()) <= {IGNORED}
    assert row.position_ids[start:].tolist() == list(range(ROW_TOKENS - start))
    assert row.input_ids.dtype == row.labels.dtype == row.position_ids.dtype == np.int64


def test_a_row_without_samples_is_all_padding(data: Fixture) -> None:
    loader = data.loader()
    empty = loader.pack_sequence([])
    assert (empty.tokens, empty.label_tokens, empty.sample_ids, empty.image_sha256) == (0, 0, (), ())
    assert empty.position_ids.tolist() == list(range(ROW_TOKENS))


def test_images_are_read_only_when_asked_for(data: Fixture) -> None:
    without, with_images = data.loader(images=False), data.loader(images=True)
    bare, full = without.sequences_for_step(0, 0, 1)[0], with_images.sequences_for_step(0, 0, 1)[0]
    assert bare.images == () and len(full.images) == len(full.image_sha256) == len(bare.image_sha256) > 0


def test_damaged_shard_fails_every_read(tmp_path: Path) -> None:
    data = Fixture(tmp_path)
    shard = next(Path(data.uri, "shards").glob("train-*.tar"))
    shard.write_bytes(shard.read_bytes()[:-1])
    loader = data.loader()
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            loader.sequences_for_step(0, 0, 1)


def test_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    data = Fixture(tmp_path)
    data.chat.tokenizer.add_tokens(["picture"])
    with pytest.raises(DataError, match="the index says"):
        data.loader().sequences_for_step(0, 0, 1)


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=3, validation_fraction=0.0)
    with pytest.raises(DataError, match="no samples"):
        PackedBatchSampler(
            Index.load(prepared.uri).split("eval"),
            DataConfig(source="unused.json", sequence_length=10, max_images_per_sequence=1),
            seed=0,
            global_batch_size=1,
        )


def test_fixture_has_the_expected_content(data: Fixture) -> None:
    assert "text" in data.split.ids
    assert 0 in data.split.image_count.tolist()
    assert data.sequence().num_steps(1) > 2


def test_a_pair_is_two_conversations_about_its_images_with_their_last_answers_labelled(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 12)
    source = write_json(tmp_path / "data.json", [one | {"rejected": "Another number."} for one in records])
    data = {"image_folder": str(images), "max_images_per_sequence": 5, "chunk_samples": 4}
    plain = job_config(tmp_path / "root", source=str(source), **data)
    stored, prepared = run_prepare(plain), run_prepare(preferring(plain))  # chunks of one are not those of the other
    assert prepared.fingerprint != stored.fingerprint
    storage, split = open_storage(prepared.uri), Index.load(prepared.uri).split("train")
    sampler = PackedBatchSampler(split, plain.data, seed=0, global_batch_size=2, in_pairs=True)
    chat, reader = Chat.load(storage, SQUARES), ShardReader.open(storage)
    loader = PackedLoader(split, sampler, chat, reader, images=True)
    loader.references = np.arange(2 * len(split), dtype=np.float32).reshape(-1, 2)
    for step in range(sampler.num_steps(1)):
        rows = loader.sequences_for_step(step, 0, 1)
        assert sampler.loss_terms(sampler.batch(step)) == sum(len(row.sample_ids) for row in rows)
        for row in rows:
            numbers = [split.ids.index(identity) for identity in row.sample_ids]
            assert len(row.images) == 2 * len(numbers) <= plain.data.max_images_per_sequence
            assert row.references.tolist() == [2 * n + which for n in numbers for which in (0, 1)]
            assert row.tokens == split.tokens[numbers].sum() and len(row.sample_tokens) == 2 * len(numbers)
            said = chat.tokenizer.decode(row.labels[row.labels != IGNORED]).replace("</s>", "|").split("|")
            expected = [(f"Number {split.ids[n].partition('-')[2]}.", "Another number.") for n in numbers]
            assert [text.strip() for text in said[:-1]] == [text for pair in expected for text in pair]
    check_totals(sampler, loader)
    plain_reader = ShardReader.open(open_storage(stored.uri))
    turns = plain_reader.turns(Index.load(stored.uri).split("train").sample_location(0))
    assert not any(turn.rejected for turn in turns), "other runs store nothing of it"


def test_pairs_that_share_have_their_prompt_and_images_once(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 12)
    of_few = [one | {"image": f"{number % 3}.png"} if "image" in one else one for number, one in enumerate(records)]
    pairs = [one | {"rejected": "Another number."} for one in of_few]
    source = write_json(tmp_path / "data.json", pairs)
    data = {"image_folder": str(images), "share_prefix": "on", "validation_fraction": 0.0}
    config = preferring(job_config(tmp_path / "root", source=str(source), **data))
    prepared = run_prepare(config)
    storage, split = open_storage(prepared.uri), Index.load(prepared.uri).split("train")
    sampler = PackedBatchSampler.of_training(split, config)
    loader = PackedLoader(split, sampler, Chat.load(storage, SQUARES), ShardReader.open(storage), images=True)
    check_totals(sampler, loader)
    for row in (row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)):
        numbers = [split.ids.index(identity) for identity in row.sample_ids]
        assert len(row.images) <= 3 and len(row.sample_tokens) == 2 * len(numbers)
        chosen, rejected = row.sample_tokens[::2], row.sample_tokens[1::2]
        again = sampler.prefixes.shared_tokens(numbers) if sampler.prefixes else []
        added = zip(chosen, rejected, again, split.pair_prefix_tokens[numbers], strict=True)
        assert [sum(of_pair) for of_pair in added] == split.tokens[numbers].tolist()
    plain = PackedBatchSampler(split, config.data, seed=0, global_batch_size=2, in_pairs=True)
    assert sampler.totals(0).tokens < 0.6 * plain.totals(0).tokens


def check_totals(sampler: PackedBatchSampler, loader: PackedLoader) -> None:
    """An epoch's totals are those of its sequences."""
    rows = [row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)]
    totals = sampler.totals(0)
    assert totals.samples == sum(len(row.sample_ids) for row in rows) and totals.sequences == len(rows)
    assert totals.tokens == sum(row.tokens for row in rows)
    assert totals.label_tokens == sum(row.label_tokens for row in rows)
    assert totals.images == sum(len(row.images) for row in rows) and totals.shown == sum(row.shown for row in rows)
    assert totals.image_tokens == sum(sum(row.image_token_counts) for row in rows)
    seen = 0
    for row in rows:
        seen += sum(tokens**2 for tokens in row.segment_tokens)
        seen += sum(2 * (end - start) * (stop - end) for start, end, stop in row.prefixes)
    assert totals.squared_tokens == pytest.approx(seen, rel=0.02)  # of a pair's unequal conversations
