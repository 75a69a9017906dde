"""The family hf: each model type trains in packed sequences as plain transformers would on one sample at a time."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.hf import table
from tests.support.hf.kinds import INSTALLED, KINDS
from tests.support.hf.published import config_of
from tests.support.hf.refused import REFUSED, refusal
from tests.support.hf.samples import RELATIVE, SAMPLES, gradients_of, ids_of, inputs_of
from tests.support.paths import ROOT
from tests.support.short_form import chosen
from tests.support.trainer.native_models import picture
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention import mixers, varlen
from vlmpipe.trainer.models.hf import trainability
from vlmpipe.trainer.models.hf.processor import PublishedImages
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import stages_of
from vlmpipe.trainer.strategies.pipeline_parallel.requirement import require_stages
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable
from vlmpipe.trainer.weights_digest import weights_sha256

pytest_plugins = ("tests.support.hf.published",)

# One of each way to keep samples apart, to count and to join images, and to place tokens.
SHORT = ("qwen3_5", "gemma3", "glm46v", "idefics3", "llava_onevision", "ovis2", "gemma4")
TYPES = chosen(INSTALLED, lambda name: name in SHORT)
# Stages and stored features are ours, and differ by how images are counted and joined.
STORED = chosen(INSTALLED, lambda name: name in ("glm46v", "idefics3", "gemma4"))
STAGED = chosen(INSTALLED, lambda name: name in ("glm46v", "llava_onevision", "gemma3"))
EVIDENCE = ROOT / "docs/reference/evidence.md"
PREFIX = ("paligemma",)  # answers that are seen before they come
# They attend under a mask that the whole model's code makes, tokens of an image see each other, or LFM2's last norm has
# another name.
UNSTAGED = ("gemma3", "gemma4", "kimi_k25", "lfm3_vl", "lfm2_vl")
UNSPLIT = (  # layers in which tensor parallelism knows not all matrices
    "qwen3_5", "lfm2_vl", "kimi_k25", "gemma4", "glm4v", "glm46v", "qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe",
    "glm_ocr", "lfm3_vl",
)  # fmt: skip
# What the refusal says, and what it advises. The rest of `REFUSED` is refused in the same ways.
REFUSALS = chosen(
    {
        "idefics2": ("does not say what stands for an image in a text", ""),
        "granite_docling": ("changes logits after its head", ""),
        "mllama": ("has no image features that take the place of tokens", ""),
        "glm5_next": (
            r"self_attn\.indexer\.\S+ of a glm5_next model gets no gradient",
            "self_attn.indexer.k_norm.weight'",
        ),
        "hunyuan_vl": ("positions of a hunyuan_vl model have 4 axes", ""),
        "gemma3n": ("a gemma3n model needs timm", "pip install timm"),
        "minicpmv4_6": ("asks for a video processor", ""),
        "florence2": ("writes answers in a decoder of its own", ""),
        "deepseek_ocr2": ("pixels in pixel_values_local too", ""),
        "phi4_multimodal": ("is no image-text model of transformers", ""),
        "llama4": ("torchvision", "from the index that torch"),
        "gemma4_unified": ("torchvision", "from the index that torch"),
    },
    lambda name: name in ("llama4", "florence2"),
)
# Files hold weights in other pieces than the model, or transposed.
REGROUPED = ("glm4v_moe", "qwen3_vl_moe", "qwen3_5_moe", "qianfan_ocr", "molmo2", "kimi_k25")


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in PREFIX])
def test_packed_samples_equal_plain_transformers_on_each(model_type: str, published: Callable[[str], Path]) -> None:
    """Loss and gradients of every token; without an image, every trained part still has a gradient."""
    config = config_of(published(model_type), freeze=())
    family, images = family_of(config), image_form_of(config).published
    assert images is not None
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    model = family.build(config, chat.tokenizer)
    ids = [ids_of(chat, config, [size for _, size in sample]) for sample in SAMPLES]
    pictures = [[picture(*one) for one in sample] for sample in SAMPLES]
    module = family.training_module(config, model, cached=False).train()
    total = sum(plain_loss(model, images, tokens, shown) for tokens, shown in zip(ids, pictures, strict=True))
    expected = gradients_of(model)
    inputs = inputs_of(ids)
    made = image_preparer(config)([one for sample in pictures for one in sample], list(map(len, pictures)))
    loss = module(**inputs, images=made.values)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(total, rel=RELATIVE)
    found = gradients_of(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == expected.keys() == trained, "a parameter without a gradient is a collective that waits"
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=RELATIVE, atol=RELATIVE * largest, msg=name)
    module(**inputs_of([ids[1]]), images={}).backward()
    assert gradients_of(model).keys() == expected.keys()
    last = dict(images=made.values, **inputs)
    module(**last).backward()
    plain = gradients_of(model)
    Recompute(tower=True).apply(family, module)
    module(**last).backward()
    again = gradients_of(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("model_type", [name for name in STAGED if name not in PREFIX])
def test_pipeline_stages_compute_what_the_whole_model_does(model_type: str, published: Callable[[str], Path]) -> None:
    """Loss and gradients to the bit, of two stages; later ones see no image."""
    config = config_of(published(model_type), freeze=())
    if model_type in UNSTAGED:
        with pytest.raises(ConfigError, match="cannot be split into pipeline stages"):
            require_stages(config)
        return
    require_stages(config)
    family, images = family_of(config), image_form_of(config).published
    assert images is not None
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    ids = [ids_of(chat, config, [size for _, size in sample]) for sample in SAMPLES]
    pictures = [picture(*one) for sample in SAMPLES for one in sample]
    inputs = inputs_of(ids) | {"images": image_preparer(config)(pictures, list(map(len, SAMPLES))).values}
    whole, staged = (family.training_module(config, family.build(config, chat.tokenizer), cached=False) for _ in "12")
    expected = whole(**inputs)
    expected.backward()
    blocks = family.blocks(staged)
    stages = stages_of(len(blocks.language_layers), 2, None, image_layers=blocks.image_layers)
    views, hidden = [blocks.view(stage) for stage in stages], None
    assert [view.tower is None for view in views] == [False, True]
    sizes = [size for sample in SAMPLES for _, size in sample]
    for view in views:
        hidden = view(**inputs, hidden=hidden)
        inputs["images"] = images.without_pixels(sizes)
    assert hidden is not None and torch.equal(hidden, expected)
    hidden.backward()
    found = {name: weight.grad for view in views for name, weight in view.named_parameters()}
    assert found.keys() == dict(whole.named_parameters()).keys(), "names are those of the whole model"
    for name, weight in whole.named_parameters():
        assert (found[name] is weight.grad is None) or torch.equal(found[name], weight.grad), name


def test_an_input_that_later_stages_would_lack_is_refused(published: Callable[[str], Path]) -> None:
    """Layers of later stages get hidden states, positions and the bounds of samples alone."""
    config = config_of(published("internvl"), freeze=())
    family = family_of(config)
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    module = family.training_module(config, family.build(config, chat.tokenizer), cached=False)
    (first, _), ids = stages_of(2, 2, None, image_layers=0), ids_of(chat, config, [])
    view = family.blocks(module).view(first)
    view.language_model.register_forward_pre_hook(
        lambda _module, args, inputs: (args, inputs | {"per_layer_inputs": torch.zeros(1, len(ids), 2, 4)}),
        with_kwargs=True,
        prepend=True,
    )
    with pytest.raises(
        ConfigError, match="take per_layer_inputs from its inputs, and later pipeline stages get hidden"
    ):
        view(**inputs_of([ids]), images={})


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in PREFIX])
def test_tokens_and_inputs_are_those_of_the_models_processor(model_type: str, published: Callable[[str], Path]) -> None:
    """With one image and with two, because some processors cut an image finer when it is alone."""
    config = config_of(published(model_type))
    images = image_form_of(config).published
    assert images is not None
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    for sample in SAMPLES:
        sizes = [size for _, size in sample]
        content = [{"type": "image"}] * len(sample) + [{"type": "text", "text": "what is this?"}]
        chats = [{"role": "user", "content": content}, {"role": "assistant", "content": "it is seven"}]
        text = chat.tokenizer.apply_chat_template(chats, tokenize=False)
        pictures = [Image.open(io.BytesIO(picture(*one))) for one in sample]
        made = images.processor(text=[text], images=pictures or None, add_special_tokens=False, return_tensors="pt")
        assert ids_of(chat, config, sizes) == made["input_ids"][0].tolist()
        for name, tensor in images.tensors(pictures).items() if pictures else ():
            assert torch.equal(tensor, torch.as_tensor(made[name])), name


@pytest.mark.parametrize("model_type", [name for name in STORED if name not in PREFIX])
def test_training_on_stored_features_equals_training_on_images(
    model_type: str, published: Callable[[str], Path]
) -> None:
    """Loss and gradients, of samples with none, one or two images, and of a sequence without any."""
    config = config_of(published(model_type), freeze=("tower",))
    family, images = family_of(config), image_form_of(config).published
    assert images is not None
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    tower, prepare = family.build_tower(config), image_preparer(config)
    shown, sizes = [one for sample in SAMPLES for one in sample], [size for sample in SAMPLES for _, size in sample]
    rows = torch.cat([family.encode(config, tower, prepare([picture(*one)]).values)[0] for one in shown])
    assert rows.dtype == torch.bfloat16 and rows.shape[1:] == family.feature_shape(config)
    ids = [ids_of(chat, config, [size for _, size in sample]) for sample in SAMPLES]
    online = prepare([picture(*one) for one in shown], list(map(len, SAMPLES))).values
    losses_and_gradients = []
    for cached, given in ((False, online), (True, images.encoded(rows, sizes))):
        model = family.build(config, chat.tokenizer)
        module = family.training_module(config, model, cached=cached).train()
        losses = [module(**inputs_of(ids), images=given), module(**inputs_of(ids[1:2]), images={})]
        sum(losses).backward()
        losses_and_gradients.append((torch.stack(losses).detach(), gradients_of(model)))
    (expected_losses, expected), (found_losses, found) = losses_and_gradients
    torch.testing.assert_close(found_losses, expected_losses, rtol=RELATIVE, atol=0)
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=RELATIVE, atol=RELATIVE * largest, msg=name)


@pytest.mark.slow
def test_a_type_with_weights_that_learn_otherwise_is_trained_with_these_frozen(tmp_path: Path) -> None:
    """As the refusal advises."""
    error = refusal("glm5_next", tmp_path)
    patterns = ast.literal_eval(error.fix.partition(" to ")[2])
    trainability.require_trainable(config_of(tmp_path, freeze_parameters=patterns), pack=False, cached=False)


def test_a_template_without_what_the_processor_puts_before_each_text_is_refused(
    published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Molmo2's does with the token that begins a text."""
    config = config_of(published("internvl"))
    images = image_form_of(config).published
    assert images is not None and images.first_tokens == []
    monkeypatch.setitem(vars(images), "first_tokens", [images.processor.tokenizer.bos_token_id])
    with pytest.raises(ConfigError, match="processor begins each text with '<s>'"):
        make_chat(config, DataConfig(source="x", sequence_length=8), ())


@pytest.mark.parametrize("model_type", TYPES)
def test_tensor_parallelism_splits_all_matrices_or_is_refused(
    model_type: str, published: Callable[[str], Path]
) -> None:
    config = config_of(published(model_type))
    if model_type in UNSPLIT:
        with pytest.raises(ConfigError, match="tensor parallelism cannot split"):
            require_shardable(config, 2, cached=False)
    else:
        require_shardable(config, 2, cached=False)


def test_a_projector_of_any_name_is_what_is_neither_encoder_nor_language_model(
    published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a language model of an unknown name is refused: it would train as a projector."""
    config = config_of(published("internvl"))
    monkeypatch.setattr("vlmpipe.trainer.models.layers.freeze.PROJECTOR_NAMES", ())
    trainability._examine.cache_clear()
    trainability.require_trainable(config, pack=True, cached=False)
    monkeypatch.setattr("vlmpipe.trainer.models.layers.freeze.LANGUAGE_NAMES", ("lm_head.",))
    trainability._examine.cache_clear()
    with pytest.raises(ConfigError, match=r"language_model\S+ of a internvl model has no name .* its language model"):
        trainability.require_trainable(config, pack=True, cached=False)
    trainability._examine.cache_clear()


def test_a_model_that_multiplies_in_bf16_alone_is_examined_in_it(
    published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's experts; there, too, samples that see each other are told from those that do not."""
    config, plain = config_of(published("internvl")), trainability.HfVLM.hidden_states

    def in_bf16(self: Any, *args: Any, **named: Any) -> Any:
        if next(self.parameters()).dtype != torch.bfloat16:
            raise RuntimeError("expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16")
        return plain(self, *args, **named)

    monkeypatch.setattr(trainability.HfVLM, "hidden_states", in_bf16)
    trainability._examine.cache_clear()
    trainability.require_trainable(config, pack=True, cached=False)
    monkeypatch.setattr("vlmpipe.trainer.models.hf.packed_samples.block_diagonal_mask", lambda *_: {})
    trainability._examine.cache_clear()
    with pytest.raises(ConfigError, match="samples in one sequence see each other"):
        trainability.require_trainable(config, pack=True, cached=False)
    trainability._examine.cache_clear()


@pytest.mark.parametrize("model_type", REFUSALS)
def test_a_type_that_cannot_be_trained_is_refused_in_a_sentence(model_type: str, tmp_path: Path) -> None:
    found, fix = REFUSALS[model_type]
    error = refusal(model_type, tmp_path)
    assert re.search(found, error.found) and fix in error.fix, str(error)
    assert not re.search(r"object has no attribute|Error:|0x", error.found)
    assert table.refused_row(model_type, tmp_path) in rows_of_docs()[1]


def plain_loss(model: Any, published: PublishedImages, tokens: list[int], images: Sequence[bytes]) -> float:
    """Summed loss of one sample by the library alone, and its gradients."""
    ids = torch.tensor([tokens])
    given = published.tensors([Image.open(io.BytesIO(image)) for image in images]) if images else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **published.types(ids), **given).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("model_type", TYPES)
def test_published_weights_are_read_one_at_a_time(model_type: str, published: Callable[[str], Path]) -> None:
    """Under whatever names they are stored; a model whose weights are stored in other pieces is loaded whole."""
    config = config_of(published(model_type))
    family, images = family_of(config), image_form_of(config).published
    assert images is not None
    tokenizer = images.processor.tokenizer
    model, initial = family.build(config, tokenizer), family.initial_weights(config, tokenizer)
    assert all(torch.equal(initial.read(name), tensor) for name, tensor in sorted(model.state_dict().items()))
    assert ("_whole" in vars(initial)) == (model_type in REGROUPED)
    assert weights_sha256(family.build_tower(config)) == weights_sha256(family.tower(model))


@pytest.mark.parametrize("model_type", chosen(TYPES, lambda name: name in ("gemma3", "llava_onevision")))
def test_the_docs_say_what_is_found(model_type: str, published: Callable[[str], Path]) -> None:
    assert table.row(model_type, published(model_type)) in table.PAGE.read_text().splitlines()


def rows_of_docs() -> tuple[list[str], list[str]]:
    """Of types that are examined, and of those that are refused before."""
    examined, refused = table.PAGE.read_text().split("## Types that are refused")
    return tuple([line for line in text.splitlines() if line.startswith("| `")] for text in (examined, refused))  # type: ignore[return-value]


def test_the_docs_list_these_types() -> None:
    listed = [[line.split("`")[1] for line in rows] for rows in rows_of_docs()]
    assert listed == [sorted(KINDS), sorted(REFUSED)]


def test_the_docs_count_the_types_that_train() -> None:
    """All but those whose row says that they are refused; some of them are tested with a further package only."""
    trained = sum("| refused: its texts" not in row for row in rows_of_docs()[0])
    (claim,) = (line for line in EVIDENCE.read_text().splitlines() if "Any image-text model of transformers" in line)
    assert f"{trained} types train" in claim
    assert f"{sum(kind.needs_torchvision for kind in KINDS.values())} of the types only where torchvision" in claim


@pytest.mark.parametrize("model_type", [name for name in PREFIX if name in INSTALLED])
def test_a_type_that_shows_answers_is_refused(model_type: str, published: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="answers would be visible"):
        trainability.require_trainable(config_of(published(model_type)), pack=True, cached=False)


def test_a_type_whose_mixers_are_not_known_is_refused_in_packed_sequences(
    published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixers, "MIXERS", {})
    monkeypatch.setattr(varlen, "MIXERS", {})
    trainability._examine.cache_clear()
    config = config_of(published("qwen3_5"))
    with pytest.raises(
        ConfigError, match=r"see each other \(its layers are full_attention, linear_attention\)"
    ) as raised:
        trainability.require_trainable(config, pack=True, cached=False)
    assert raised.value.fix == "set data.pack to false"
    trainability.require_trainable(config, pack=False, cached=False)
    trainability._examine.cache_clear()


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in PREFIX])
def test_a_type_that_keeps_samples_apart_passes(model_type: str, published: Callable[[str], Path]) -> None:
    found = trainability.examine(config_of(published(model_type)))
    assert found.keeps_apart and found.is_causal and found.has_plain_head


def test_the_examination_finds_samples_that_see_each_other(
    published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the library's masks, without what keeps samples apart in them."""
    monkeypatch.setattr("vlmpipe.trainer.models.hf.model.HfVLM._masks_of_blocks", lambda *_: None)
    monkeypatch.setattr("vlmpipe.trainer.models.hf.packed_samples._both", lambda mask, seen: mask)
    trainability._examine.cache_clear()
    found = trainability.examine(config_of(published("gemma3")))
    trainability._examine.cache_clear()
    assert not found.keeps_apart and found.is_causal
