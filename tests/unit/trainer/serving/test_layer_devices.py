"""A model on several devices answers as on one. GPUs are pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import ModuleList
from transformers import DynamicCache

from tests.support.trainer.few_layers import MODELS, two_questions
from tests.support.trainer.pretended_gpus import PretendedGpus
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.serving import layer_devices
from vlmpipe.trainer.serving.layer_devices import language_layers, spread

GPUS = [torch.device("cuda", number) for number in range(3)]


@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_one_device_and_layers_are_on_all(kind: str) -> None:
    torch.manual_seed(1)
    model = MODELS[kind]().eval()
    given = two_questions(kind, model)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    alone = model.generate(**given, **asked)
    unseen = model.generate(**given | {"pixel_values": torch.zeros_like(given["pixel_values"])}, **asked)
    assert not torch.equal(alone.sequences, unseen.sequences), "answers depend on the image"
    with PretendedGpus() as gpus:
        spread(model, GPUS)
        places = [{gpus.place(one).index for one in layer.parameters()} for layer in language_layers(model)]
        assert sorted(places, key=min) == places and {1} in places and places[-1] == {2}, "in order, each on one"
        layers = ModuleList(language_layers(model))
        assert {gpus.place(one) for one in set(model.parameters()) - set(layers.parameters())} == {GPUS[0]}
        together = model.generate(**{name: one.to(GPUS[0]) for name, one in given.items()}, **asked)
        kept = [{gpus.place(layer.keys).index} for layer in together.past_key_values.layers]
        assert kept == places, "keys and values are beside their layer"
    assert torch.equal(alone.sequences, together.sequences)


def test_without_the_hooks_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_devices, "_moved", lambda values, _device: values)
    with PretendedGpus(), pytest.raises(RuntimeError, match="same device"):
        model = spread(MODELS["llava"](), GPUS)
        model.generate(torch.ones(1, 3, dtype=torch.long).to(GPUS[0]), max_new_tokens=2)


def test_bounds_of_packed_samples_go_where_their_layer_is_and_a_cache_does_not() -> None:
    cache, samples = DynamicCache(), CuSeqlens.of([[2, 2]], 4)
    with PretendedGpus() as gpus:
        (args, kwargs) = layer_devices._moved(((cache,), {"samples": samples, "masks": [torch.ones(2)]}), GPUS[1])
        assert args[0] is cache
        assert gpus.place(kwargs["samples"].device_bounds) == gpus.place(kwargs["masks"][0]) == GPUS[1]
