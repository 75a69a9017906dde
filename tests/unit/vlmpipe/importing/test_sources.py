from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.guides.deepspeed import DEEPSPEED
from tests.support.guides.listings import LISTINGS
from tests.support.guides.settings import COMMANDS, SETTINGS
from vlmpipe.importing.json_with_comments import without_comments
from vlmpipe.importing.sources import Kind, command_source, read_source, source_of
from vlmpipe.trainer.errors import ConfigError, UserError


def test_the_kind_follows_from_the_content_alone() -> None:
    kinds = {name: source_of(text, "file").kind for name, text in {**SETTINGS, **COMMANDS, **LISTINGS}.items()}
    assert {kinds[name] for name in COMMANDS} == {Kind.COMMAND}
    assert {kinds[name] for name in LISTINGS} == {Kind.JOB_SPEC, Kind.PYTHON}
    assert [kinds[name] for name in SETTINGS] == [
        Kind.TRL, Kind.LLAMA_FACTORY, Kind.AXOLOTL, Kind.ACCELERATE, Kind.TRANSFORMERS
    ]  # fmt: skip


def test_json_may_have_comments_and_a_last_comma() -> None:
    text = '{\n// a\n"train_batch_size": 8, /* b */ "zero_optimization": {"stage": 2, "x": "http://y,}"},}'
    assert source_of(text, "ds.json").content["zero_optimization"] == {"stage": 2, "x": "http://y,}"}
    assert without_comments('"//" // x') == '"//"  '
    assert without_comments("/* " * 300_000) == " "


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is empty"),
        ("<!doctype html><p>", "page for a browser"),
        ("import torch\nmodel = torch.nn.Linear(1, 1)\ndef main(): pass\n", "makes no job"),
        ("x: [1, 2", "not valid YAML"),
        ("hello: 1\nworld: 2\n", "no kind that can be imported"),
        ("name: a\nmodel: {}\ndata: {}\ntrain: {}\n", "is a run file"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "given twice"),
        ("worker_pool_specs: []\n", "no worker pool"),
        ("zero_optimization: " + "{a: " * 50 + "1" + "}" * 50, "nested too deep"),
    ],
)
def test_what_cannot_be_imported_is_an_error(text: str, found: str) -> None:
    from vlmpipe.importing.importer import import_run_file

    with pytest.raises(ConfigError, match=found):
        import_run_file(source_of(text, "file"))


def test_settings_of_torchtune_are_no_configuration_of_deepspeed() -> None:
    text = "batch_size: 2\noptimizer: {_component_: torch.optim.AdamW, lr: 1e-4}\nepochs: 1\n"
    with pytest.raises(ConfigError, match="torchtune, which is not imported"):
        source_of(text, "f.yaml")


def test_files_are_regular_and_of_limited_size(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.json", tmp_path / "pipe"
    large.write_text(" " * ((1 << 20) + 1))
    os.mkfifo(pipe)
    for path in (large, pipe, tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            read_source(path)


@pytest.mark.parametrize(
    "text",
    [
        "# 22 GiB\nCUDA_VISIBLE_DEVICES=0,1 \\\nNPROC_PER_NODE=2 \\\nswift sft \\\n  --model x\n",
        "#!/bin/bash\nlr=1e-5\nif [ -d x ]; then\n rm -r x\nfi\ntorchrun t.py --lr $lr\n",
        "set -x\nN=${N:-8}\nACC=$((128 / 4 / N))\nDIR='a b'\nif [ ! -d \"$DIR\" ]; then\n mkdir x\nfi\ntorchrun t.py\n",
    ],
)
def test_scripts_of_a_shell_are_commands(text: str) -> None:
    assert source_of(text, "run.sh").kind is Kind.COMMAND


def test_a_command_has_words() -> None:
    for text in ("", "  # nothing", "torchrun 'x"):
        with pytest.raises(ConfigError):
            command_source(text)


def test_configurations_of_deepspeed_are_known_by_one_key() -> None:
    assert all(source_of(str(value).replace("'", '"').replace("True", "true").replace("False", "false"), "x").kind
               is Kind.DEEPSPEED for value in DEEPSPEED.values())  # fmt: skip
