"""Starting llava from whole LLaVAs: published layouts and own exports, complete or by parts, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tests.fakes.gcs.server import FakeGcs
from tests.support.short_form import chosen
from tests.support.trainer.published_llava import (
    NUM_SHARDS,
    PUBLISHED,
    SIZES,
    START,
    config_of,
    whole_of,
    with_processor,
    write_published,
)
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.dataloading.batches import collate, online_images
from vlmpipe.trainer.dataloading.readers import open_readers
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.data import open_data
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.file_sums import upload_folder
from vlmpipe.trainer.weights_digest import weights_sha256

# Each reads the parts it needs from a whole LLaVA: by layers, by heads and by stages.
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {"train.strategy": "fsdp"},
    "lora": {"model.lora": {"rank": 2}},
    **{name: strategy_changes(name) for name in ("tp", "pp", "zero3")},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA in the layout of llava-hf/llava-1.5-7b-hf, in several shards."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(7)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, patch_size=8, image_size=32).to_dict(),
        text_config=LlamaConfig(**SIZES, num_key_value_heads=4, vocab_size=310, max_position_embeddings=512).to_dict(),
        projector_hidden_act="quick_gelu",
        image_seq_length=16,
        image_token_index=299,
    )
    write_published(folder, config, LlavaForConditionalGeneration(config).state_dict())
    return folder


def parts_of(model: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def test_a_published_layout_starts_a_run_as_transformers_loads_it(
    published: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = config_of(pretrained={"weights": str(published)})
    family = family_of(config)
    theirs = LlavaForConditionalGeneration.from_pretrained(published, dtype=torch.float32).eval()
    ours = family.build(config, tokenizer).eval()
    assert_equal(ours.state_dict(), theirs.state_dict())
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert ours.config.image_token_id == image
    theirs.config.image_token_id = theirs.model.config.image_token_id = image
    inputs = {"input_ids": torch.tensor([[1, *[image] * 16, 5, 6]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    assert weights_sha256(family.build_tower(config)) == weights_sha256(theirs.model.vision_tower)
    initial = family.initial_weights(config, tokenizer)
    assert_equal({name: initial.read(name) for name in sorted(ours.state_dict())}, ours.state_dict())
    deferred = family.blueprint(config, tokenizer, buffers=True)
    DeferredWeights(deferred, initial, torch.device("cpu")).fill(deferred)
    assert_equal(deferred.state_dict(), ours.state_dict())


def test_parts_come_from_sources_of_their_own(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    theirs = LlavaForConditionalGeneration.from_pretrained(published, dtype=torch.float32)
    whole = {"weights": str(published)}
    text = {"model_type": "llama", **SIZES, "num_key_value_heads": 4}
    tower = {"config": {"model_type": "clip_vision_model", **SIZES, "patch_size": 8}}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"tower": whole, "language_model": {"config": text}}, ["model.vision_tower."]),
        ({"tower": tower, "projector": whole, "language_model": {"config": text}}, ["model.multi_modal_projector."]),
        ({"tower": tower, "language_model": whole}, ["model.language_model.", "lm_head."]),
        (
            {"tower": tower, "projector": whole, "language_model": whole},
            ["model.multi_modal_projector.", "model.language_model.", "lm_head."],
        ),
    ]
    for sources, taken in cases:
        config = config_of(**sources)
        model = family_of(config).build(config, tokenizer)
        for prefix in PUBLISHED:
            found, expected = parts_of(model, prefix), parts_of(theirs, prefix)
            same = found.keys() == expected.keys() and all(
                found[name].shape == tensor.shape and torch.equal(found[name], tensor)
                for name, tensor in expected.items()
                if tensor.ndim > 1
            )
            assert same == (prefix in taken), (sources, prefix)
        initial = family_of(config).initial_weights(config, tokenizer)
        assert_equal({name: initial.read(name) for name in sorted(model.state_dict())}, model.state_dict())
        assert [name for name, origin in config.origins().items() if str(published) in origin] == [
            name for name, part in sources.items() if part is whole
        ]


def without(folder: Path, target: Path, removed: str, *, change: Any = None) -> Path:
    """A copy of a model in one file, without the names that hold `removed`, or with them changed."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    kept = {name: tensor for name, tensor in stored.items() if removed not in name}
    if change:
        kept |= {name: change(tensor) for name, tensor in stored.items() if removed in name}
    save_file(kept, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        ("vision_tower.vision_model.encoder.layers.1.mlp.fc", r"lacks 4 of the \d+ weights of the tower, for example"),
        ("linear_2", r"lacks 2 of the 4 weights of the projector, for example linear_2\."),
        ("language_model.model.norm", r"lacks 1 of the \d+ weights of the language model, for example model\.norm\."),
        ("lm_head", r"lacks 1 of the \d+ weights of the language model, for example lm_head\.weight"),
    ],
)
def test_missing_weights_are_counted_and_named_and_never_drawn(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, removed: str, sentence: str
) -> None:
    config = config_of(pretrained={"weights": str(without(published, tmp_path / "less", removed))})
    with pytest.raises(ConfigError, match=sentence):
        family_of(config).build(config, tokenizer)


def test_weights_in_other_shapes_are_counted_and_named(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    narrow = without(published, tmp_path / "narrow", "linear_2.weight", change=lambda tensor: tensor[:, 1:].clone())
    config = config_of(pretrained={"weights": str(narrow)})
    with pytest.raises(ConfigError, match=r"1 of the 4 weights .*linear_2.weight is \(32, 31\) instead of \(32, 32\)"):
        family_of(config).build(config, tokenizer)


def test_a_pickled_projector_is_refused_in_words(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    (tmp_path / "mm_projector.bin").write_bytes(b"\x80\x04.")
    whole = {"weights": str(published)}
    config = config_of(tower=whole, projector={"weights": str(tmp_path)}, language_model=whole)
    with pytest.raises(
        ConfigError, match=r"lacks 4 of the 4 weights of the projector[^|]*mm_projector.bin is a pickle"
    ):
        family_of(config).build(config, tokenizer)


def test_a_whole_model_that_is_a_pickle_alone_is_refused_in_words(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    torch.save({"lm_head.weight": torch.zeros(4, 4)}, tmp_path / "pytorch_model.bin")
    config = config_of(pretrained={"weights": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"lacks \d+ of the \d+ weights[^|]*pytorch_model.bin is a pickle"):
        family_of(config).build(config, tokenizer)


def test_a_language_model_that_is_a_pickle_alone_is_refused_in_words_and_never_read(
    published: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    llama = {"model_type": "llama", "vocab_size": 300, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(llama | {"architectures": ["LlamaForCausalLM"]}))
    touched = tmp_path / "code was run"
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch \"" + str(touched).encode() + b"\"'\ntR.")
    whole = {"weights": str(published)}
    config = config_of(tower=whole, projector=whole, language_model={"weights": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no .safetensors file; pytorch_model.bin is a pickle") as caught:
        family_of(config).build(config, tokenizer)
    assert "save_pretrained" in caught.value.fix and not touched.exists()


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"feature_layer": -1}, "trained with -2", "set model.feature_layer to -2"),
        ({"feature_select": "full"}, "trained with drop_cls", "set model.feature_select to drop_cls"),
        ({"image_size": 64}, "tower's image_size is 32", "set model.image_size to 32"),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused_with_the_value_to_set(
    published: Path, changes: dict[str, Any], found: str, fix: str
) -> None:
    config = config_of(pretrained={"weights": str(published)}, **changes)
    with pytest.raises(ConfigError, match=found) as caught:
        family_of(config).shape(config)
    assert caught.value.fix == fix
    same = config_of(pretrained={"weights": str(published)}, feature_layer=1)  # of layers 0 to 2, that is -2
    assert family_of(same).shape(same).total_parameters


@pytest.fixture(scope="module")
def stage_one(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    job = make_run(
        tmp_path_factory.mktemp("stages"),
        "align",
        {"model.freeze": ["tower", "language_model"], "train.max_steps": 2, "features.cache": "off"},
        features="off",
    )
    train_runs([job], processes=1)
    sync_run(job)
    return job


def loss_of_first_step(job: JobConfig, export: str) -> float:
    """Of an exported model, loaded by plain transformers, on the packed sequences of the job's first step."""
    data, model = open_data(job), LlavaForConditionalGeneration.from_pretrained(export, dtype=torch.float32)
    module = family_of(job.model).training_module(job.model, model, cached=False).eval()
    samples = open_readers(job).samples
    loader = PackedLoader(data.train, data.sampler, data.chat, samples, images=True)
    batch = collate(loader.sequences_for_step(0, 0, 1), online_images(image_preparer(job.model)))
    with torch.no_grad():
        return float(module(**batch.to(torch.device("cpu")))) / len(batch.label_ids)


@pytest.mark.slow
def test_a_second_stage_starts_where_the_export_of_the_first_is(stage_one: JobConfig) -> None:
    export = f"{stage_one.run.run_uri}/export"
    settings = {"pretrained": {"weights": export}, "tokenizer": export, "image_size": 32, "freeze": []}

    def stage_two(name: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(Path(stage_one.run.root_uri), name, {"model": settings, **START, **changes}, features="off")

    one = stage_two("full", {})
    train_runs([one], processes=1)
    cases = chosen(SHARDED, lambda name: name in ("fsdp", "lora", "tp"))
    two = [stage_two(name, changes) for name, changes in cases.items()]
    train_runs(two, processes=2)
    expected = loss_of_first_step(one, export)
    for job in (one, *two):
        assert losses(job)[0] == pytest.approx(expected, rel=1e-5), job.run.run_id
        assert summary(job)["initial_weights"] == {"pretrained": export}
    described = sync_run(one)
    model = LlavaForConditionalGeneration.from_pretrained(f"{one.run.run_uri}/export", dtype=torch.float32)
    assert described["weights_sha256"] == weights_sha256(model)


def test_a_run_from_a_bucket_is_that_from_a_folder_and_reads_each_file_once(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        upload_folder(open_storage("gs://bucket/llava"), with_processor(published, tmp_path / "uploaded"))
        common = START | SHARDED["fsdp"]
        bucket = make_run(tmp_path, "bucket", common | {"model": whole_of("gs://bucket/llava")}, features="off")
        folder = with_processor(published, tmp_path / "llava")
        local = make_run(tmp_path, "local", common | {"model": whole_of(folder)}, features="off")
        train_runs([bucket, local], processes=2)
        assert len(server.ranges) == NUM_SHARDS + 3, "index, configuration and image processor are the others"
    assert losses(bucket) == losses(local)


@pytest.mark.slow
def test_every_strategy_starts_from_a_published_layout(published: Path, tmp_path: Path) -> None:
    """As one process does; the first two losses, so that what was read is also trained."""
    folder = with_processor(published, tmp_path / "llava")
    common = START | {"train.max_steps": 2, "model": whole_of(folder)}
    one = make_run(tmp_path, "one", common, features="off")
    train_runs([one], processes=1)
    two = [
        make_run(tmp_path, name, common | changes, features="off")
        for name, changes in SHARDED.items()
        if name != "lora"
    ]
    train_runs(two, processes=2)
    for job in two:
        assert losses(job) == pytest.approx(losses(one), rel=1e-5), job.run.run_id
