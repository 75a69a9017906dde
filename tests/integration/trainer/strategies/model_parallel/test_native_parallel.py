"""Tensor and pipeline parallelism of the Qwen-VL families against one process: images of different sizes in packed
rows, three-axis positions, a fused product for queries, keys and values in the tower, and levels of DeepStack.

In the short form two ranks hold one copy of each family's model and train all of it. Checkpoints go on in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import RELATIVE, RELATIVE_BF16, TOWER_TRAINED, trained_weights
from tests.support.trainer.native_models import SIZES, picture
from tests.support.trainer.native_runs import STOP_STEP, Content, base_of, train
from tests.support.trainer.native_sequences import as_plain_transformers_takes, config_of, sequence_of
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, metrics, summary
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import GRID_FAMILIES
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.strategies.tensor_parallel import plan as split
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable

# Of Qwen3-VL two levels of the tower reach the first two of five layers, so that four stages can be cut.
DEEP: Content = TOWER_TRAINED | {
    "model.pretrained.config.text_config.num_hidden_layers": 5,
    "model.pretrained.config.vision_config.depth": 3,
    "train.validate_every_steps": 2,
    "train.validation_sequences": 2,
}
LEVELS = {"model.pretrained.config.vision_config.deepstack_visual_indexes": [0, 1]}
INTERLEAVED: Content = {"train.virtual_stages": 2}
# Each sample is a row and a micro-batch: some have no image.
UNPACKED: Content = {"data.pack": False, "train.global_batch_size": 4}
ADAPTED: Content = {"model.lora": {"rank": 4, "alpha": 8.0}}
SHARED: Content = {"train.sequence_parallel": True}
BF16, RECOMPUTED = {"train.precision": "bf16"}, {"train.activation_checkpointing": "full"}
# What is trained: on how many processes, by what strategy, with what changes, and the run of one process it equals.
CASES: dict[str, tuple[int, str, Content, str]] = chosen(
    {
        "tp": (2, "tp", TOWER_TRAINED, "trained tower"),
        "tp shared tokens": (2, "tp", TOWER_TRAINED | SHARED, "trained tower"),
        "tp frozen tower": (2, "tp", {}, "frozen tower"),
        "tp cached": (2, "tp", {"features.cache": "on"}, "frozen tower"),
        "tp adapters": (2, "tp", ADAPTED, "adapters"),
        "tp checkpointing": (2, "tp", TOWER_TRAINED | RECOMPUTED, "trained tower"),
        "tp all logits": (2, "tp", TOWER_TRAINED | {"train.loss_chunk_tokens": 0}, "trained tower"),
        "tp two copies": (4, "tp", TOWER_TRAINED, "trained tower"),
        "tp two copies frozen tower": (4, "tp", {}, "frozen tower"),
        "tp two copies shared tokens": (4, "tp", TOWER_TRAINED | SHARED, "trained tower"),
        "tp two copies shared tokens checkpointing": (4, "tp", SHARED | RECOMPUTED, "frozen tower"),
        "tp two copies adapters": (4, "tp", ADAPTED, "adapters"),
        "pp": (2, "pp", TOWER_TRAINED, "trained tower"),
        "pp frozen tower": (2, "pp", {}, "frozen tower"),
        "pp cached": (2, "pp", {"features.cache": "on"}, "frozen tower"),
        "pp adapters": (2, "pp", ADAPTED, "adapters"),
        "pp checkpointing": (2, "pp", TOWER_TRAINED | RECOMPUTED, "trained tower"),
        "pp unpacked": (2, "pp", TOWER_TRAINED | UNPACKED, "unpacked"),
        "pp two copies": (4, "pp", TOWER_TRAINED | UNPACKED, "unpacked"),
        "pp interleaved": (2, "pp", DEEP | INTERLEAVED, "deep"),
        "pp four stages": (4, "pp", DEEP | {"train.pipeline_parallel": 4}, "deep"),
        "tp+pp+dp": (4, "tp+pp+dp", TOWER_TRAINED, "trained tower"),
        "tp+pp+dp frozen tower": (4, "tp+pp+dp", {}, "frozen tower"),
        "tp+pp+dp cached": (4, "tp+pp+dp", {"features.cache": "on"}, "frozen tower"),
        "tp+pp+dp adapters": (4, "tp+pp+dp", ADAPTED, "adapters"),
        "tp+pp+dp interleaved shared tokens": (4, "tp+pp+dp", DEEP | INTERLEAVED | SHARED, "deep"),
        "tp+pp+dp two copies": (8, "tp+pp+dp", TOWER_TRAINED | UNPACKED, "unpacked"),
    },
    lambda name: name in ("tp", "pp"),
)
# Close, for computed in bf16.
ROUNDED: dict[str, tuple[int, str, Content, str]] = {
    "tp bf16": (2, "tp", TOWER_TRAINED | BF16, "trained tower"),
    "tp two copies bf16": (4, "tp", TOWER_TRAINED | BF16, "trained tower"),
    "pp bf16": (2, "pp", TOWER_TRAINED | BF16, "trained tower"),
}
# Who begins a run and who goes on with it, in `LAYOUTS`: processes, strategy and what else is changed.
MOVES: dict[str, tuple[str, str]] = chosen(
    {
        "tp to one": ("tp", "one"),
        "tp shared tokens to one": ("tp shared tokens", "one"),
        "one to tp": ("one", "tp"),
        "tp two copies to one": ("tp two copies", "one"),
        "one to tp two copies": ("one", "tp two copies"),
        "tp two copies to tp": ("tp two copies", "tp"),
        "pp to one": ("pp", "one"),
        "one to pp": ("one", "pp"),
        "tp+pp+dp to one": ("tp+pp+dp", "one"),
        "one to tp+pp+dp": ("one", "tp+pp+dp"),
        "tp+pp+dp to tp": ("tp+pp+dp", "tp"),
    },
    lambda name: name == "tp shared tokens to one",
)
LAYOUTS: dict[str, tuple[int, str, Content]] = {
    "one": (1, "ddp", {}),
    "tp": (2, "tp", {}),
    "tp shared tokens": (2, "tp", SHARED),
    "tp two copies": (4, "tp", {}),
    "pp": (2, "pp", {}),
    "tp+pp+dp": (4, "tp+pp+dp", {}),
}
REFERENCES: dict[str, Content] = {
    "trained tower": TOWER_TRAINED,
    "frozen tower": {},
    "adapters": ADAPTED,
    "deep": DEEP,
    "unpacked": TOWER_TRAINED | UNPACKED,
}
Runs = dict[tuple[str, str], JobConfig]  # by family and name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All families in the same processes: starting them takes longer than these runs do."""
    root, done = tmp_path_factory.mktemp("native-tensor"), Runs()
    base = {family: base_of(root, family) for family in GRID_FAMILIES}

    def job(family: str, name: str, strategy: str, changes: Content) -> JobConfig:
        features = "reuse" if changes.get("features.cache") == "on" else "off"
        levels = LEVELS if family == "qwen3_vl" and DEEP.keys() <= changes.keys() else {}
        content = {**base[family], **strategy_changes(strategy), **changes, **levels}
        return make_run(root, f"{family}-{name.replace(' ', '-')}", content, features=features)

    cases = CASES | (ROUNDED if WHOLE else {})
    begins, ends = ({name: LAYOUTS[move[number]] for name, move in MOVES.items()} for number in (0, 1))
    begun: list[tuple[int, JobConfig]] = []
    for family in GRID_FAMILIES:
        for name in sorted({reference for *_, reference in cases.values()}):
            done[family, name] = job(family, name, "ddp", REFERENCES[name] | EVERY_STEP)
            begun.append((1, done[family, name]))
        for name, (processes, strategy, changes, _) in cases.items():
            done[family, name] = job(family, name, strategy, changes)
            begun.append((processes, done[family, name]))
        for name in (name for name in cases if name.endswith("cached")):
            encode_features(done[family, name])
        stop = TOWER_TRAINED | {"train.max_steps": STOP_STEP}
        for name, (processes, strategy, changes) in begins.items():
            begun.append((processes, job(family, name, strategy, stop | changes)))
    train(begun)
    ended: list[tuple[int, JobConfig]] = []
    for family in GRID_FAMILIES:
        for name, (processes, strategy, changes) in ends.items():
            done[family, name] = job(family, name, strategy, TOWER_TRAINED | changes)
            ended.append((processes, done[family, name]))
    train(ended)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_ranks_that_hold_a_model_together_equal_one_process(family: str, name: str, runs: Runs) -> None:
    processes, *_, reference = CASES[name]
    job, expected = runs[family, name], runs[family, reference]
    assert summary(job)["world_size"] == processes
    held_out, of_one = (held_out_losses(each) for each in (job, expected))
    assert held_out == pytest.approx(of_one, rel=RELATIVE)
    # The last step is always validated, where there is a validation split.
    assert len(of_one) == (2 if reference == "deep" else 1)
    norms = [line["grad_norm"] for line in metrics(expected)]
    assert max(norms) > job.train.clip_grad_norm, "clipping must be active for its equality to mean anything"
    assert reference != "trained tower" or any("attn.qkv.weight" in each for each in trained_weights(expected))
    require_equal_training(job, expected)


def held_out_losses(job: JobConfig) -> list[float]:
    return [line["validation_loss"] for line in metrics(job) if "validation_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_bf16_stays_close_to_fp32(family: str, name: str, runs: Runs) -> None:
    expected = losses(runs[family, ROUNDED[name][-1]])
    assert losses(runs[family, name]) == pytest.approx(expected, rel=RELATIVE_BF16)
    assert losses(runs[family, name]) != pytest.approx(expected, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_checkpoints_go_from_one_layout_to_another(family: str, name: str, runs: Runs) -> None:
    expected = losses(runs[family, "trained tower"])
    assert summary(runs[family, name])["resumed_from_step"] == STOP_STEP
    assert len(losses(runs[family, name])) == len(expected) > STOP_STEP
    assert losses(runs[family, name]) == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_an_export_gives_the_logits_of_one_process_in_plain_transformers(family: str, runs: Runs) -> None:
    sample = [(1, SIZES[2]), (2, SIZES[1])]
    input_ids, _ = sequence_of(config_of(family), [sample])
    images = image_preparer(config_of(family))([picture(*one) for one in sample])
    logits = []
    for name in ("trained tower", "tp", "pp"):
        sync_run(runs[family, name])
        folder = open_storage(runs[family, name].run.run_uri).uri("export")
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        given = as_plain_transformers_takes(images, input_ids, model.config.image_token_id)
        logits.append(model(input_ids=input_ids, **given).logits)
    for of_ranks in logits[1:]:
        torch.testing.assert_close(of_ranks, logits[0], rtol=1e-4, atol=1e-5)
    assert logits[0].std() > 0.01, "the tolerance must be far below what logits differ by"


def test_a_fused_product_of_an_unknown_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may lie in another order, in which a rank's would be those of other heads."""
    config = config_of("qwen3_vl")
    require_shardable(config, 2, cached=False)
    monkeypatch.setattr(split, "FUSED_ATTENTION", ())
    with pytest.raises(ConfigError, match=r"cannot split 'attn\.qkv' of a Qwen3VLVisionBlock"):
        require_shardable(config, 2, cached=False)
    require_shardable(config, 2, cached=True)  # the tower is not there


@pytest.mark.slow
def test_slices_of_unequal_length_of_a_fused_weight_equal_one_process(tmp_path: Path) -> None:
    """Two ranks have 24 of the 48 rows of queries, keys and values each, and five slice these."""
    base = (
        base_of(tmp_path, "qwen2_5_vl")
        | TOWER_TRAINED
        | {"train.global_batch_size": 10, "train.max_steps": 2, **EVERY_STEP}
    )
    one, ten = (
        make_run(tmp_path, name.replace("+", "-"), {**base, **strategy_changes(name)}, features="off")
        for name in ("ddp", "tp")
    )
    train([(1, one), (10, ten)])
    assert summary(ten)["world_size"] == 10
    assert any(name.endswith("attn.qkv.weight") and len(w) / 2 % 5 for name, w in trained_weights(one).items())
    require_equal_training(ten, one)
