"""Runs that export an adapter alone: evaluated on its base as the merged model is, and started from by others."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.runs import losses, make_run, run_ranks, train_runs
from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.registry.model_card import loading, model_card
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage

LORA = {"rank": 4, "alpha": 8.0}
FULL: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """A base; a run of two steps on it whose adapter is exported; and two that start from that adapter."""
    root = tmp_path_factory.mktemp("adapters")

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        common = {"features.cache": "off", "train.max_steps": 2, "train.optimizer.learning_rate": 0.02}
        return make_run(root, name, common | changes, features="off")

    made = {"base": run("base", {"train.max_steps": 1})}
    train_runs([made["base"]], processes=1)
    sync_run(made["base"])
    base = open_storage(made["base"].run.run_uri).uri("export")
    on_base = {
        "model": {"pretrained": {"weights": base}, "tokenizer": base, "image_size": 32, "lora": LORA},
        "model.lora.export": "adapter",
    }
    made["adapter"] = run("adapter", on_base)
    quantized = on_base | {"model.lora.quantize_base": "nf4", "train.seed": 1}
    made["quantized"] = run("quantized", quantized)
    train_runs([made["adapter"], made["quantized"]], processes=1)
    for name in ("adapter", "quantized"):
        sync_run(made[name])
    started = on_base | {"model.lora.pretrained": open_storage(made["adapter"].run.run_uri).uri("export")}
    made |= {name: run(name, started | {"train.strategy": name}) for name in ("ddp", "fsdp")}
    train_runs([made["ddp"], made["fsdp"]], processes=2)
    return made


def evaluated(job: JobConfig) -> tuple[list[dict[str, Any]], float]:
    """Answers and loss of the job's export."""
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    store = open_storage(job.run.run_uri)
    answers = [json.loads(line) for line in store.read("predictions.jsonl").splitlines()]
    return answers, json.loads(store.read("evaluate.json"))["loss"]


@pytest.mark.slow
def test_an_adapter_is_evaluated_as_the_merged_model_of_its_checkpoint(runs: dict[str, JobConfig]) -> None:
    job = runs["adapter"]
    folder = Path(job.run.run_uri, "export")
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} < names
    assert not any(name.startswith("model") for name in names), "no weight of the base is exported"
    answers, loss = evaluated(job)
    whole = job.model_copy(
        update={"model": job.model.model_copy(update={"lora": job.model.lora.model_copy(update={"export": "merged"})})}
    )
    assert not sync_run(whole)["reused"]
    assert "model.safetensors" in {path.name for path in folder.iterdir()}
    merged_answers, merged_loss = evaluated(whole)
    assert not sync_run(job)["reused"]
    assert loss == pytest.approx(merged_loss, rel=1e-5)
    assert [one["prediction"] for one in answers] == [one["prediction"] for one in merged_answers]


@pytest.mark.slow
def test_peft_loads_the_adapter_of_a_4_bit_base_onto_the_base_itself(runs: dict[str, JobConfig]) -> None:
    """With what was trained, and the base's own weights under it; the run's evaluation measures that model."""
    from peft import PeftModel

    job = runs["quantized"]
    assert losses(job) != losses(runs["adapter"])
    assert job.model.pretrained
    base = AutoModelForImageTextToText.from_pretrained(job.model.pretrained.weights, **FULL)
    plain = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = PeftModel.from_pretrained(base, f"{job.run.run_uri}/export")
    assert model.peft_config["default"].base_model_name_or_path == job.model.pretrained.weights
    found, trained = dict(model.base_model.model.named_parameters()), trained_weights(job)
    assert any(".lora_B." in name and weight.any() for name, weight in trained.items())
    for name, weight in trained.items():
        parent, _, own = name.rpartition(".")
        assert torch.equal(found[name if name in found else f"{parent}.modules_to_save.default.{own}"], weight), name
    under = {name.replace(".base_layer.", "."): weight for name, weight in found.items() if ".base_layer." in name}
    assert under and all(torch.equal(weight, plain[name]) for name, weight in under.items())
    assert evaluated(job)[1] > 0


@pytest.mark.slow
def test_two_adapters_of_one_base_in_the_registry_are_loaded_together(
    runs: dict[str, JobConfig], tmp_path: Path
) -> None:
    """By PEFT, from the folders that the versions name."""
    registry, names = FolderRegistry(str(tmp_path / "registry")), ("adapter", "quantized")
    for name in names:
        uri = f"{runs[name].run.run_uri}/export"
        weights = runs[name].model.pretrained.weights
        registry.register("digits", Candidate(run_id=name, export_uri=uri, metrics={}, base=weights), "card")
    first, second = registry.versions("digits")
    assert first.base == second.base
    from peft import PeftModel

    def base() -> Any:
        return AutoModelForImageTextToText.from_pretrained(first.base, **FULL)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.arange(4, 24)[None]).logits

    plain, alone = logits(base()), [logits(PeftModel.from_pretrained(base(), one.model_uri)) for one in (first, second)]
    both = PeftModel.from_pretrained(base(), first.model_uri, adapter_name="first")
    both.load_adapter(second.model_uri, adapter_name="second")
    for name, expected in zip(("first", "second"), alone, strict=True):
        both.set_adapter(name)
        assert torch.equal(logits(both), expected), name
    assert not torch.equal(*alone) and not any(torch.equal(plain, one) for one in alone)


@pytest.mark.slow
def test_training_starts_from_an_adapter_under_every_way_to_build_a_model(runs: dict[str, JobConfig]) -> None:
    """ddp builds the model whole, fsdp without its weights."""
    job = runs["fsdp"]
    assert losses(job) == pytest.approx(losses(runs["ddp"]), rel=1e-5)
    tokenizer = load_tokenizer(open_storage(job.pointers().prepared_uri))
    built = family_of(job.model).build(job.model, tokenizer)
    for name, weight in trained_weights(runs["adapter"]).items():
        assert torch.equal(built.get_parameter(name), weight), name


@pytest.mark.slow
def test_the_model_card_names_the_base_and_its_code_answers(runs: dict[str, JobConfig], tmp_path: Path) -> None:
    job = runs["adapter"]
    card = model_card(job, Evaluation(), Summary(), model="digits")
    assert "library_name: peft" in card and "LoRA, rank 4, alpha 8, in language_model; adapter" in card
    assert f"`{job.model.pretrained.weights}`" in card
    Image.new("L", (32, 32), 90).save(tmp_path / "image.png")
    for path in Path(job.run.run_uri, "export").iterdir():
        (tmp_path / path.name).symlink_to(path)
    code = loading(job.model).removeprefix("```python\n").removesuffix("```")
    said = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(said):
        exec(compile(code, "model card", "exec"), {})
    assert said.getvalue()
