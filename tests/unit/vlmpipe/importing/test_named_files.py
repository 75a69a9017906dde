from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.findings import Finding, Outcome
from vlmpipe.importing.importer import Imported, import_run_file
from vlmpipe.importing.named_files import NamedFiles, NotOpenedError, with_argument_files
from vlmpipe.importing.sources import command_source, read_source

MODEL = "--model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct"
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 50_000_000},
    "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": "auto",
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
LLAMA_FACTORY = f"""
{MODEL.removeprefix("--").replace(" ", ": ")}
stage: sft
finetuning_type: lora
cutoff_len: 2048
learning_rate: 1.0e-4
deepspeed: ds.json
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(ZERO3))
    Path("accelerate.yaml").write_text(ACCELERATE)
    Path("lf.yaml").write_text(LLAMA_FACTORY)
    Path("args.txt").write_text("# of the guide\n--learning_rate 3e-5\n--num_train_epochs\n2\n")
    return tmp_path


def imported(command: str) -> tuple[Imported, RunConfig]:
    result = import_run_file(command_source(command))
    return result, parse_run_config(parse_yaml(result.text, "command"), "command")


def finding(result: Imported, path: str) -> Finding:
    return next(found for found in result.findings if found.path == path)


def test_values_of_deepspeeds_file_are_imported_with_the_command() -> None:
    result, config = imported(f"deepspeed --num_gpus 8 sft_vlm.py {MODEL} --deepspeed ds.json")
    assert (config.train.strategy, config.train.clip_grad_norm) == ("zero3", 0.5)
    assert config.train.deepspeed == {"zero_optimization": {"stage3_prefetch_bucket_size": 50_000_000}}
    assert finding(result, "ds.json.zero_optimization.stage").field == "train.strategy"
    assert finding(result, "ds.json.train_micro_batch_size_per_gpu").outcome is Outcome.DROPPED


def test_accelerates_configuration_says_strategy_and_machines() -> None:
    _, config = imported(f"accelerate launch --config_file accelerate.yaml sft_vlm.py {MODEL}")
    assert (config.train.strategy, config.train.offload, config.train.precision) == ("zero3", "optimizer", "bf16")
    assert (config.cluster.replica_count, config.cluster.accelerator_count) == (2, 8)


def test_a_program_of_ones_own_runs_without_accelerates_configuration() -> None:
    result, config = imported("accelerate launch --config_file accelerate.yaml mine.py")
    assert config.cluster.env == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert config.cluster.replica_count == 2
    refused = finding(result, "accelerate.yaml.deepspeed_config.zero_stage")
    assert refused.outcome is Outcome.REFUSED and "without accelerate's configuration" in refused.reason


@pytest.mark.parametrize(
    ("command", "rate"),
    [
        ("llamafactory-cli train lf.yaml", 1e-4),
        ("llamafactory-cli train lf.yaml learning_rate=5e-5", 5e-5),
        ("torchrun --nproc_per_node 8 src/train.py lf.yaml", 1e-4),
    ],
)
def test_settings_of_a_known_program_are_read_and_the_command_comes_first(command: str, rate: float) -> None:
    _, config = imported(command)
    assert config.train.trainer is None
    assert (config.train.strategy, config.train.optimizer.learning_rate) == ("zero3", rate)
    assert config.model.lora is not None


def test_words_of_a_file_stand_in_its_place() -> None:
    result, config = imported(f"torchrun sft_vlm.py {MODEL} @args.txt")
    assert (config.train.optimizer.learning_rate, config.train.epochs) == (3e-5, 2)
    assert finding(result, "files of arguments.@args.txt").outcome is Outcome.DROPPED


def test_arguments_that_are_not_read_are_no_value_of_the_option_before_them() -> None:
    result, config = imported(f"torchrun sft_vlm.py {MODEL} @none.txt --learning_rate 1e-5")
    assert config.train.optimizer.learning_rate == 1e-5
    assert finding(result, "arguments.model_name_or_path").outcome is Outcome.EXPRESSED
    assert finding(result, "files of arguments.@none.txt").outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("accelerate launch --config_file none.yaml mine.py", "accelerate.config_file"),
        ("llamafactory-cli train none.yaml", "arguments.word 1"),
        ("torchrun mine.py @none.txt", "files of arguments.@none.txt"),
        ("torchrun mine.py --deepspeed none.json", "none.json"),
    ],
)
def test_a_file_that_is_not_here_is_named(command: str, path: str) -> None:
    assert "is not here" in finding(imported(command)[0], path).reason


def test_of_a_program_of_ones_own_batch_and_rate_are_known() -> None:
    Path("own.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 2}}))
    result, config = imported("deepspeed mine.py --deepspeed_config own.json")
    assert config.train.global_batch_size == 64 and config.train.trainer
    assert finding(result, "own.json.zero_optimization.stage").reason == "the program reads it from its own image"


def test_files_next_to_the_imported_one_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = import_run_file(read_source(folder / "lf.yaml"))
    assert finding(result, "ds.json.gradient_clipping").outcome is Outcome.EXPRESSED


def test_nothing_outside_and_nothing_but_a_regular_file_is_opened(folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    (inside / "link.json").symlink_to(folder / "ds.json")
    os.mkfifo(inside / "pipe.json")
    (inside / "large.json").write_text(" " * (1 << 20) + "{}")
    (inside / "bytes.json").write_bytes(b"\xff\xfe")
    files = NamedFiles((inside,))
    names = ["../ds.json", str(folder / "ds.json"), "link.json", "pipe.json", "large.json", "bytes.json", "a\0b", ".",
             "gs://bucket/ds.json", "x" * 5000]  # fmt: skip
    for name in names:
        with pytest.raises(NotOpenedError):
            files.text(name)


def test_a_file_of_arguments_names_no_other_and_is_bounded() -> None:
    Path("loop.txt").write_text("@loop.txt")
    Path("long.txt").write_text("a " * 6000)
    words, notes = with_argument_files(["@loop.txt", "@long.txt", "@", "me@x"], NamedFiles((Path(),)))
    assert words == ["@loop.txt", "@long.txt", "@", "me@x"]
    assert all(notes.values()) and len(notes) == 2
