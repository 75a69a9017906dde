"""Videos as such: tokens, times, loss and answers are those of transformers; cached features equal the tower."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.data.videos import write_video
from tests.support.trainer.chat_templates import PLAIN
from tests.support.trainer.native_models import write_data
from tests.support.trainer.native_videos import RECORDS, Videos, video_job
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, train_runs
from vlmpipe.audit.page import build_page
from vlmpipe.report.inspection.seen_images import SeenImages
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.repeated_images import flag
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.model import GRID_FAMILIES
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.data.prepare.inspect import pieces_of
from vlmpipe.trainer.data.prepare.validation.final_ids import final_entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate, online_images
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, ShownImages, answer_questions
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.feature_cache.encode import encode_images
from vlmpipe.trainer.models.grid_images import VIDEO_TOKEN
from vlmpipe.trainer.models.image_inputs import Images, join_features
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage

CPU = torch.device("cpu")
FAMILIES = sorted(GRID_FAMILIES)


@pytest.fixture(scope="module", params=FAMILIES)
def videos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Videos:
    return Videos.prepared(tmp_path_factory.mktemp(request.param), request.param)


def written(videos: Videos, number: int, *, prompt: bool = False) -> str:
    """A sample as its template writes it, with videos as parts of their own."""
    turn = videos.reader.turns(videos.split.sample_location(number))[0]
    texts = turn.question.split("<image>")
    chat: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": texts[0]}]}]
    for (size, _), text in zip(videos.shown(number), texts[1:], strict=True):
        kind = "video" if hasattr(size, "patches") else "image"
        chat[0]["content"][-1]["text"] = chat[0]["content"][-1]["text"].removesuffix("\n")
        chat[0]["content"] += [{"type": kind}, {"type": "text", "text": text.removeprefix("\n")}]
    if not prompt:
        chat.append({"role": "assistant", "content": turn.answer})
    made: str = videos.chat.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    return made


def test_tokens_and_positions_are_those_of_transformers(videos: Videos) -> None:
    assert list(videos.split.ids) == ["both", "image", "two"]
    start, row = 0, videos.loader.pack_sequence([0, 1, 2])
    for number, tokens in enumerate(row.sample_tokens):
        given = videos.by_the_library(number, written(videos, number))
        assert row.input_ids[start : start + tokens].tolist() == given["input_ids"][0].tolist()
        named = {name: given[name] for name in given if not name.startswith("pixel_values")}
        expected, _ = videos.plain.model.get_rope_index(**named)
        assert row.position_ids[1:, start : start + tokens].tolist() == expected[:, 0].tolist()
        start += tokens
    text = videos.chat.tokenizer.decode(row.input_ids[: row.sample_tokens[0]])
    assert ("<0.7 seconds><|vision_start|><|video_pad|>" in text) == (videos.job.model.family == "qwen3_vl")
    # Patches in time count as images: 1 + 3, 1, and 1 + 3, where two frames are a patch.
    assert videos.split.shown().tolist() == [4, 1, 4] and row.shown == 9
    assert row.image_token_counts[1] == 3 * (row.image_token_counts[1] // 3)


def test_an_audit_takes_no_video_for_a_blank_image_and_shows_its_first_frame(videos: Videos) -> None:
    found, catalogue = audit(AuditRequest(videos.job, videos.uri, has_run=False))
    assert not found.finding("blank_image").flagged
    outlier = found.finding("outlier").model_copy(update={"flagged": (flag(catalogue, 2, "outlier", "two videos"),)})
    page = build_page("v", found.model_copy(update={"findings": (outlier,)}), catalogue.stored)
    assert "two videos" in page and "data:image/" in page and "damaged" not in page


def test_the_loss_of_a_packed_sequence_is_that_of_its_samples_in_transformers(videos: Videos) -> None:
    """With the tower in the step, and with features that were cached as the job caches them."""
    config, family = videos.job.model, family_of(videos.job.model)
    row, expected = videos.loader.pack_sequence([0, 1, 2]), 0.0
    start = 0
    for number, tokens in enumerate(row.sample_tokens):
        given = videos.by_the_library(number, written(videos, number))
        labels = torch.from_numpy(row.labels[start : start + tokens])[None]
        with torch.no_grad():
            expected += float(videos.plain(**given, labels=labels).loss) * int((labels != -100).sum())
        start += tokens
    batch = collate([row], online_images(image_preparer(config)))
    tower, stored = family.build_tower(config), dict(zip(row.image_sha256, row.images, strict=True))
    tower.load_state_dict(family.tower(videos.plain).state_dict())
    features = {}
    for made in encode_images(videos.job, tower, list(stored), stored.__getitem__, CPU):
        features |= made
    joined = join_features([features[sha256] for sha256 in row.image_sha256], family.feature_shape(config))
    cached = collate([row], lambda _: Images(joined))

    def loss(given: PackedBatch, *, is_cached: bool = False, tower_trains: bool = False) -> float:
        model = copy.deepcopy(videos.plain)  # a module with cached features takes the tower out
        if tower_trains:
            model.requires_grad_(True)
        module = family.training_module(config, model, cached=is_cached).eval()
        with torch.no_grad():
            return float(module(**given.to(CPU)))

    assert loss(batch, tower_trains=True) == pytest.approx(expected, rel=1e-5)
    assert loss(batch) == loss(cached, is_cached=True)  # features of a frozen tower are rounded to bf16
    assert loss(batch) == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_jobs_train_and_evaluate_on_videos(tmp_path: Path) -> None:
    """Of two sources, so prepared in chunks, only one of which has videos."""
    records = [one | {"id": f"{one['id']}-{number}"} for number in range(6) for one in RECORDS]
    job = video_job(tmp_path, "qwen2_5_vl", records=records)
    sources = [
        {"name": "videos", "uri": job.data.source},
        {"name": "pictures", "uri": write_data(tmp_path / "pictures")["source"]},
    ]
    data = job.data.model_dump(exclude_defaults=True) | {"source": "", "sources": sources}
    data |= {"validation_fraction": 0.3, "split_by": "record", "max_reject_fraction": 0.0}
    changes = {"model": job.model.model_dump(exclude_defaults=True), "data": data, "train.max_steps": 3}
    cached = make_run(tmp_path / "root", "cached", changes)
    encode_features(cached)
    online = make_run(tmp_path / "root", "online", changes, features="off")
    train_runs([cached, online], processes=1)
    assert losses(cached) == pytest.approx(losses(online), rel=1e-5) and len(losses(cached)) == 3
    sync_run(cached)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{cached.run.run_uri}/run.json"], processes=1)
    result = json.loads(open_storage(cached.run.run_uri).read("evaluate.json"))
    assert result["questions"] > 3 and result["loss"] > 0


def test_answers_are_those_of_transformers(videos: Videos) -> None:
    split, asked, expected = videos.split, [], []
    family = family_of(videos.job.model)
    for number in range(len(split)):
        place = split.sample_location(number)
        shown = ShownImages(
            split.image_token_counts(number), split.image_sizes(number), split.image_sha256(number),
            lambda place=place: videos.reader.images(place), are_cached=False,
        )  # fmt: skip
        asked.append(Asked(videos.reader.turns(place)[0], shown, shown))
        given = videos.by_the_library(number, written(videos, number, prompt=True))
        made = videos.plain.generate(
            **given, max_new_tokens=6, do_sample=False, eos_token_id=videos.chat.end_token_ids, pad_token_id=0
        )
        text = videos.chat.tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        expected.append(text.strip())
    model = AnsweringModel(family, videos.plain, videos.chat, None, BatchBudget(10_000))
    assert [one.text for one in answer_questions(videos.job, model, asked, CPU, max_new_tokens=6)] == expected
    assert len(set(expected)) > 1
    # Grids of videos are not in the order of what is shown: questions about one are not answered from one beginning.
    twice = answer_questions(videos.job, model, [one for one in asked for _ in range(2)], CPU, max_new_tokens=6)
    assert [one.text for one in twice] == [text for text in expected for _ in range(2)]
    assert model.shared.is_equal is None


def test_people_see_the_first_frame_of_each_patch_and_its_tokens(videos: Videos) -> None:
    size, frames = videos.shown(2)[1]
    seen = SeenImages(videos.job.model)(videos.reader.images(videos.split.sample_location(2)))
    assert len(seen) == 1 + 3 and len({picture.size for picture in seen}) == 1
    width, height = seen[1].size
    expected = [np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC), int) for frame in frames[::2]]
    assert [int(abs(np.asarray(one) - other).max()) for one, other in zip(seen[1:], expected, strict=True)] == [0] * 3
    encoded = videos.chat.encode(
        videos.reader.turns(videos.split.sample_location(2)), videos.split.image_token_counts(2), [(96, 48), size]
    )
    shown = [(piece.text, piece.tokens) for piece in pieces_of(videos.chat, encoded) if piece.is_image]
    assert shown[0] == ("<|image_pad|>", shown[0][1]) and {text for text, _ in shown[1:]} == {VIDEO_TOKEN}


def test_data_with_videos_is_not_exported_as_images(videos: Videos, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has videos that are not images"):
        export_data(videos.uri, "trl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("frames", "data", "code", "message"),
    [
        (1, {"data.video_fps": 0.0}, RejectCode.MEDIA_MISSING_PART, "v.mp4 has 0.1 s and 1 frames; a patch takes 2"),
        (
            17,
            {"data.video_fps": 1.0},
            RejectCode.MEDIA_MISSING_PART,
            "17 frames, 1 at data.video_fps 1; a patch",
        ),
        (40, {"data.sequence_length": 40}, RejectCode.CONV_TOO_LONG, "tokens, more than data.sequence_length 40"),
        (40, {"data.max_images_per_sequence": 2}, RejectCode.CONV_TOO_MANY_IMAGES, "0 images and 3 patches in time"),
        (40, {"data.max_image_pixels": 99}, RejectCode.IMAGE_TOO_LARGE, "96 x 48 pixels"),
        (40, {"data.video_fps": 0.0, "data.video_frames": 9}, None, ""),
    ],
)
def test_a_video_that_does_not_fit_is_a_reject(
    tmp_path: Path, frames: int, data: dict[str, Any], code: RejectCode | None, message: str
) -> None:
    records = [{"id": "one", "video": "v.mp4", "asked": "what is this?"}]
    job = video_job(tmp_path, "qwen2_5_vl", records=records, **data)
    write_video(tmp_path / "v.mp4", frames)
    (record,) = open_source(job.data)
    made = SampleValidator(job, make_chat(job.model, job.data, ()))(final_entry(record, "new", "train"))
    if code is None:
        assert isinstance(made, Accepted) and made.images[0].clip
        assert (made.images[0].clip.patches, made.images[0].clip.patch_s) == (4, 1.0), "an even number of frames"
    else:
        assert isinstance(made, Reject) and made.code == code and message in made.message


def test_a_template_or_a_tokenizer_without_videos_is_refused(tmp_path: Path) -> None:
    job = video_job(tmp_path, "qwen3_vl", template=PLAIN)
    with pytest.raises(ConfigError, match="the chat template writes none between"):
        make_chat(job.model, job.data, ())
    bare = job.model.model_copy(update={"tokenizer": "train:300"})
    own = job.data.model_copy(update={"chat_template": "vlmpipe"})
    with pytest.raises(ConfigError, match=f"lacks {VIDEO_TOKEN}".replace("|", r"\|")):
        make_chat(bare, own, ["what is this?"])
