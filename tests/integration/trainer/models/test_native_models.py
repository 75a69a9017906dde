"""The native families: their images and positions in packed rows, and exports for plain transformers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.support.short_form import WHOLE
from tests.support.trainer.equalities import TOWER_RECOMPUTED, TOWER_TRAINED, begin_in_the_middle
from tests.support.trainer.native_models import SIZES, picture, write_data
from tests.support.trainer.native_sequences import (
    Picture,
    as_plain_transformers_takes,
    config_of,
    sequence_of,
    tokenizer_of,
    trained_tokenizer,
)
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, metrics, run_ranks, summary, train_runs
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.registry.model_card import loading
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import GRID_FAMILIES, IMAGE_TOKEN
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.evaluation.evaluate import load_subject
from vlmpipe.trainer.models.hf.grids import tower_output
from vlmpipe.trainer.models.hf.vision_attention import sizes_of
from vlmpipe.trainer.models.image_inputs import Images
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.layers.freeze import part_of
from vlmpipe.trainer.models.packed_vlm import PackedInputs
from vlmpipe.trainer.models.pixels import decoded
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.weights_digest import weights_sha256

FAMILIES = GRID_FAMILIES
ENGINES = ("ddp", "fsdp") if WHOLE else ("fsdp",)  # on cached features; what is online is DDP's
TRAINED = FAMILIES if WHOLE else ["qwen3_vl"]  # over several processes; all else is tested of each family
RELATIVE = 1e-5  # fp32 sums in another order
STEPS, STOP_STEP = 4 if WHOLE else 3, 2
MIDDLE = {"train.checkpoint_every_steps": STOP_STEP}  # where another run goes on
SPLIT = ("tp", "pp")
ADAPTERS = {"model.lora": {"rank": 4}}
ROW: tuple[list[Picture], ...] = ([(1, SIZES[2]), (2, SIZES[1])], [], [(3, SIZES[3])], [(4, SIZES[4])])


@pytest.mark.parametrize("cached", [False, True], ids=["online", "cached"])
@pytest.mark.parametrize("family_name", FAMILIES)
def test_a_packed_sample_equals_plain_transformers_on_it_alone(family_name: str, cached: bool) -> None:
    """The library places positions itself, sees one sample at a time, and encodes its images alone.

    Nothing is rounded to bf16 here: a tower that is trained is not, and features are taken as they come.
    """
    config = config_of(family_name, freeze=())
    family, prepare = family_of(config), image_preparer(config)
    plain = family.build(config, tokenizer_of(family_name)).eval()
    pictures = [[picture(*one) for one in sample] for sample in ROW]
    expected = []
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)  # so large that attention tells tokens apart, and so positions
        for sample, images in zip(ROW, pictures, strict=True):
            input_ids, _ = sequence_of(config, [sample])
            given = as_plain_transformers_takes(prepare(images), input_ids, plain.config.image_token_id)
            expected.append(plain(input_ids=input_ids, **given).logits[0])
        all_images = prepare([one for sample in pictures for one in sample])
        if cached:
            tower = family.tower(plain)
            all_images = Images(
                tower_output(tower, all_images.values, sizes_of(tower, all_images.grids, torch.device("cpu")))
            )
        row, places = sequence_of(config, ROW)
        module = family.training_module(config, plain, cached=cached).eval()
        found: list[torch.Tensor] = []
        module.token_loss.forward = lambda head, hidden, label_ids, *_: found.append(head(hidden)) or torch.zeros(())
        index = torch.arange(row.shape[1])
        module(**inputs_of(row, places, index, index, all_images))
    torch.testing.assert_close(found[0], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert torch.cat(expected).std() > 0.1, "the tolerance must be far below what logits differ by"


def inputs_of(
    ids: torch.Tensor, places: torch.Tensor, label_index: torch.Tensor, label_ids: torch.Tensor, images: Images
) -> PackedInputs:
    inputs = PackedInputs(
        input_ids=ids, position_ids=places, label_index=label_index, label_ids=label_ids, images=images.values
    )
    if images.grids is not None:
        inputs["image_grids"] = images.grids
    return inputs


@pytest.mark.parametrize("family_name", FAMILIES)
def test_a_packed_sequences_loss_and_gradients_equal_its_samples(family_name: str) -> None:
    config = config_of(family_name, freeze=())
    family, prepare = family_of(config), image_preparer(config)
    module = family.training_module(config, family.build(config, tokenizer_of(family_name)), cached=False).train()

    def step(rows: Sequence[Sequence[Sequence[Picture]]]) -> tuple[float, list[torch.Tensor]]:
        """Summed loss of every other token of rows of samples, and the gradients."""
        module.zero_grad()
        total = 0.0
        for samples in rows:
            ids, places = sequence_of(config, samples)
            lengths = [sequence_of(config, [sample])[0].shape[1] for sample in samples]
            stops = np.cumsum(lengths)
            index = torch.cat([torch.arange(end - one, end - 1, 2) for end, one in zip(stops, lengths, strict=True)])
            images = prepare([picture(*one) for sample in samples for one in sample])
            loss = module(**inputs_of(ids, places, index, ids[0, index + 1], images))
            loss.backward()
            total += float(loss.detach())
        return total, [each.grad.clone() for each in module.parameters() if each.grad is not None]

    (packed, gradients), (alone, of_samples) = step([ROW]), step([[sample] for sample in ROW])
    assert packed == pytest.approx(alone, rel=RELATIVE)
    largest = max(float(each.abs().max()) for each in of_samples)
    for found, expected in zip(gradients, of_samples, strict=True):
        torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=RELATIVE * largest)


@pytest.mark.parametrize("frozen", [("tower",), ()])
@pytest.mark.parametrize("family_name", FAMILIES)
def test_a_sequence_without_image_gives_every_trained_part_a_gradient(
    family_name: str, frozen: tuple[str, ...]
) -> None:
    """A parameter without a gradient is a collective that one rank skips."""
    config = config_of(family_name, freeze=frozen)
    family = family_of(config)
    module = family.training_module(config, family.build(config, tokenizer_of(family_name)), cached=False).train()
    ids, places = sequence_of(config, [[]])
    made = image_preparer(config)([])
    module(**inputs_of(ids, places, torch.arange(3), ids[0, 1:4], made)).backward()
    without = [name for name, each in module.named_parameters() if each.requires_grad and each.grad is None]
    assert not without
    frozen_names = [name for name, each in module.named_parameters() if not each.requires_grad]
    assert bool(frozen_names) == bool(frozen) and all(part_of(name) == "tower" for name in frozen_names)


@pytest.mark.parametrize("names", ["as they are", "of the first release"])
@pytest.mark.parametrize("family_name", FAMILIES)
def test_pretrained_weights_are_kept(family_name: str, names: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    family = family_of(config_of(family_name))
    drawn = family.build(config_of(family_name, seed=5), tokenizer_of(family_name))
    stored = {name: tensor.clone() for name, tensor in drawn.state_dict().items()}
    if names == "of the first release":
        renamed = {"model.visual.": "visual.", "model.language_model.": "model."}
        for new, old in renamed.items():
            stored = {name.replace(new, old, 1) if name.startswith(new) else name: t for name, t in stored.items()}
    if drawn.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    drawn.config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    family.image_processor(config_of(family_name)).save_pretrained(tmp_path)
    config = config_of(family_name, pretrained={"weights": str(tmp_path)})
    longer = trained_tokenizer("train:310", ["USER: what is this? ASSISTANT: it is seven or eight or nine"], config)
    model = family.build(config, longer)
    for name, tensor in drawn.state_dict().items():
        assert torch.equal(model.state_dict()[name][: len(tensor)], tensor), name
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied == drawn.config.tie_word_embeddings, "else each would be trained by itself"
    assert len(model.get_input_embeddings().weight) == len(longer) > 300, "the tokenizer's own tokens get rows"
    assert weights_sha256(family.build_tower(config)) == weights_sha256(family.tower(model))
    initial = family.initial_weights(config, longer)
    assert all(torch.equal(initial.read(name), tensor) for name, tensor in sorted(model.state_dict().items()))
    deferred = family.blueprint(config, longer, buffers=True)
    assert all(parameter.is_meta for parameter in deferred.parameters())
    DeferredWeights(deferred, initial, torch.device("cpu")).fill(deferred)
    assert (deferred.lm_head.weight is deferred.get_input_embeddings().weight) == is_tied
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(deferred, kind)()), dict(getattr(model, kind)())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), kind


def test_a_model_of_another_family_is_refused() -> None:
    config = config_of("qwen2_5_vl", pretrained={"config": {"model_type": "qwen2_vl"}})
    with pytest.raises(ConfigError, match=r"model\.pretrained is a qwen2_vl model, and model\.family is qwen2_5_vl"):
        family_of(config).build(config, tokenizer_of("qwen2_5_vl"))


@pytest.fixture(scope="module", params=TRAINED)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """Runs of one family, by what is special: samples have none, one or two images, and each is a row of its own."""
    root = tmp_path_factory.mktemp(request.param)
    base = {
        "model": model_section(request.param),
        "data": {**write_data(root / "data"), "pack": False, "validation_fraction": 0.3},
        "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.max_steps": STEPS,
    }  # fmt: skip
    whole = {**base, "train.micro_batch_size": 4, "train.loss_chunk_tokens": 0}
    packed = {**base, "data.pack": True, "train.global_batch_size": 16, "train.max_steps": 1}
    encode_features(make_run(root, "features", base))
    alone = {
        "reference": make_run(root, "reference", whole | EVERY_STEP),
        "packed": make_run(root, "packed", packed),
        "unpacked": make_run(root, "unpacked", packed | {"data.pack": False, "train.global_batch_size": 32}),
        "reference-tower": make_run(root, "reference-tower", whole | TOWER_TRAINED | EVERY_STEP, features="off"),
    }
    if WHOLE:
        alone["reference-adapters"] = make_run(root, "reference-adapters", whole | ADAPTERS | EVERY_STEP)
    train_runs(list(alone.values()), processes=1)
    two = {name: make_run(root, name, base | {"train.strategy": name} | MIDDLE) for name in ENGINES}
    two["online"] = make_run(root, "online", base, features="off")
    fsdp = {**base, "train.strategy": "fsdp"}
    two["fsdp-tower"] = make_run(root, "fsdp-tower", fsdp | TOWER_RECOMPUTED, features="off")
    train_runs(list(two.values()), processes=2)
    resumed = make_run(root, "resumed", fsdp)
    begin_in_the_middle(resumed, two["fsdp"], STOP_STEP)
    more = {"resumed": resumed}
    if WHOLE:
        more["adapters"] = make_run(root, "adapters", fsdp | ADAPTERS)
        more["ddp-tower"] = make_run(root, "ddp-tower", base | TOWER_RECOMPUTED, features="off")
        more["bf16"] = make_run(root, "bf16", fsdp | {"train.precision": "bf16"}, features="off")
        more["checkpointing"] = make_run(root, "checkpointing", base | {"train.activation_checkpointing": "selective"})
    if WHOLE:
        for name in SPLIT:
            more[name] = make_run(root, name, base | strategy_changes(name))
            more[f"{name}-tower"] = make_run(
                root, f"{name}-tower", base | strategy_changes(name) | TOWER_RECOMPUTED, features="off"
            )
    train_runs(list(more.values()), processes=2)
    if WHOLE:
        zeros = {name: make_run(root, name, base | {"train.strategy": name}) for name in ("zero2", "zero3")}
        train_runs(list(zeros.values()), processes=2)
        more |= zeros
    return alone | two | more


def test_every_strategy_equals_one_process(runs: dict[str, JobConfig]) -> None:
    """With ranks that have no image in a step; cached features equal the tower online."""
    expected = losses(runs["reference"])
    assert len(set(expected)) == STEPS
    more = ("zero2", "zero3", "checkpointing", *SPLIT) if WHOLE else ()
    for name in (*ENGINES, "online", *(name for name in more if name in runs)):
        require_equal_training(runs[name], runs["reference"])
    assert (summary(runs["fsdp"])["features"], summary(runs["online"])["features"]) == ("cached", "online")


def test_a_trained_tower_equals_one_process(runs: dict[str, JobConfig]) -> None:
    expected = losses(runs["reference-tower"])
    assert expected[2:] != pytest.approx(losses(runs["reference"])[2:], rel=RELATIVE)
    more = ("ddp-tower", *(f"{name}-tower" for name in SPLIT))
    for name in ("fsdp-tower", *(name for name in more if name in runs)):
        require_equal_training(runs[name], runs["reference-tower"])


@pytest.mark.slow
def test_adapters_equal_one_process(runs: dict[str, JobConfig]) -> None:
    expected = losses(runs["reference-adapters"])
    assert expected[2:] != pytest.approx(losses(runs["reference"])[2:], rel=RELATIVE)
    require_equal_training(runs["adapters"], runs["reference-adapters"])


@pytest.mark.slow
def test_bf16_stays_close_to_fp32(runs: dict[str, JobConfig]) -> None:
    assert losses(runs["bf16"]) == pytest.approx(losses(runs["reference"]), rel=5e-3)


def test_packed_equals_unpacked(runs: dict[str, JobConfig]) -> None:
    assert summary(runs["packed"])["tokens"] == summary(runs["unpacked"])["tokens"]
    for name in ("loss", "grad_norm"):
        packed, unpacked = ([line[name] for line in metrics(runs[run])] for run in ("packed", "unpacked"))
        assert packed == pytest.approx(unpacked, rel=RELATIVE), name


def test_resumed_equals_uninterrupted(runs: dict[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["fsdp"])


def test_an_export_gives_the_same_logits_and_answers_in_plain_transformers(runs: dict[str, JobConfig]) -> None:
    job = runs["reference-tower"]
    sync_run(job)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    folder = open_storage(job.run.run_uri).uri("export")
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    result = json.loads(open_storage(job.run.run_uri).read("evaluate.json"))
    said = [json.loads(line) for line in open_storage(job.run.run_uri).read("predictions.jsonl").splitlines()]
    assert result["questions"] == len(said) > 3 and result["loss"] > 0
    subject = load_subject(job, ProcessContext(0, 1, 0, 1, torch.device("cpu")))
    total, labels, tokens_of = 0.0, 0, image_tokens_of(job.model)

    def of_types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        is_image = (ids == plain.config.image_token_id).int()
        return {"mm_token_type_ids": is_image}

    for number in range(len(subject.split)):
        images = subject.validation.shards.images(subject.split.sample_location(number))
        turns = subject.validation.shards.turns(subject.split.sample_location(number))
        made = dict(processor(list(map(decoded, images)), return_tensors="pt")) if images else {}
        sizes = subject.split.image_sizes(number)
        counts, form = [tokens_of(*size) for size in sizes], image_form_of(job.model)
        asked = turns[0].question.replace(f"{IMAGE_TOKEN}\n", "")
        content = [*[{"type": "image"} for _ in images], {"type": "text", "text": asked}]
        message = {"role": "user", "content": content}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        for count, mark in zip(counts, form.replacements(sizes), strict=True):
            text = text.replace(IMAGE_TOKEN, mark.replace(IMAGE_TOKEN, "<one>" * count), 1)
        text = text.replace("<one>", IMAGE_TOKEN)
        answer = f" {turns[0].answer}{tokenizer.eos_token}"
        prompt_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        both = tokenizer(text + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
        given = made | of_types(both)
        with torch.no_grad():
            logits = plain(input_ids=both, **given).logits[0, prompt_ids.shape[1] - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, both[0, prompt_ids.shape[1] :], reduction="sum"))
            labels += len(logits)
            given = made | of_types(prompt_ids)
            generated = plain.generate(input_ids=prompt_ids, **given, max_new_tokens=4, do_sample=False)
        told = tokenizer.decode(generated[0, prompt_ids.shape[1] :], skip_special_tokens=True).strip()
        assert said[number]["prediction"] == told
    assert result["loss"] == pytest.approx(total / labels, rel=1e-3)
    answer_as_the_model_card_says(job, Path(folder))


def answer_as_the_model_card_says(job: JobConfig, folder: Path) -> None:
    """Run the card's code, in the folder, as a person would."""
    (folder / "image.png").write_bytes(picture(0, (40, 16)))
    code = loading(job.model).removeprefix("```python\n").removesuffix("```")
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        exec(compile(code, "model card", "exec"), {})
    assert said.getvalue().strip()
