"""The start program of the serving image: what it fetches from a bucket, and what vLLM gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.paths import ROOT
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode
from vlmpipe.trainer.serving.vllm_server import local_arguments
from vlmpipe.trainer.storage import model_folders, open_storage
from vlmpipe.trainer.storage.base import crc32c_of
from vlmpipe.trainer.storage.export_manifest import MARKER, write_description
from vlmpipe.trainer.storage.model_folders import revision_of

BASE, RUN = "gs://bucket/base", "gs://bucket/run"
ADAPTER = f"{RUN}/export"
OF_BASE = {
    "config.json": b'{"of": "base"}',
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00001.safetensors": b"weights of the base",
    "tokenizer_config.json": b'{"of": "base"}',
    "preprocessor_config.json": b'{"of": "base"}',
    "generation_config.json": b'{"repetition_penalty": 1.05}',
    "chat_template.jinja": b"base",
    "added_tokens.json": b"{}",
}
OF_RUN = {
    "config.json": b'{"of": "run"}',
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": b"weights of the adapter",
    "tokenizer_config.json": b'{"of": "run"}',
    "tokenizer.json": b"[]",
    "preprocessor_config.json": b'{"of": "run"}',
    "generation_config.json": b"{}",
    "chat_template.jinja": b"run",
}
# What a model is served with: weights and configuration of the base, all else of the run and nothing of the base.
SERVED = {name: OF_BASE[name] for name in ("config.json", "model.safetensors.index.json")} | {
    "model-00001-of-00001.safetensors": OF_BASE["model-00001-of-00001.safetensors"],
    **{name: OF_RUN[name] for name in OF_RUN if name not in ("config.json",) and not name.startswith("adapter")},
}
# Instead of vLLM: prints its arguments and the files of the model's folder.
STAND_IN = f"""#!{sys.executable}
import json, pathlib, sys
folder = pathlib.Path(sys.argv[2])
print(json.dumps([sys.argv[1:], {{path.name: path.read_bytes().decode() for path in folder.iterdir()}}]))
"""


@pytest.fixture
def bucket(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(model_folders, "_in_use", {})
    store, run = open_storage(BASE), open_storage(RUN)
    for name, data in OF_BASE.items():
        store.write(name, data)
    for name, data in OF_RUN.items():
        run.write(f"export/{name}", data)
    files = {name: {"bytes": len(data), "crc32c": crc32c_of(data)} for name, data in OF_RUN.items()}
    write_description(run, {"files": files})
    yield gcs_server


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


def test_an_adapter_in_a_bucket_is_served_on_its_base_with_its_own_settings(bucket: FakeGcs) -> None:
    asked = [BASE, "--port=8080", "--enable-lora", f"--lora-modules=digits={ADAPTER}", f"--settings={ADAPTER}"]
    model, port, enabled, adapter = local_arguments(asked)
    assert contents(model) == SERVED
    assert (port, enabled) == ("--port=8080", "--enable-lora")
    name, _, folder = adapter.removeprefix("--lora-modules=").partition("=")
    assert name == "digits" and contents(folder).keys() == {*OF_RUN, MARKER}


def test_the_pinned_revision_of_a_base_in_a_bucket_is_held(bucket: FakeGcs) -> None:
    pinned = [BASE, f"--revision={revision_of(BASE)}", f"--settings={ADAPTER}"]
    (model,) = local_arguments(pinned)
    assert contents(model) == SERVED
    open_storage(BASE).write("config.json", b'{"of": "somebody else"}')
    model_folders._in_use.clear()
    with pytest.raises(ConfigError, match=f"{BASE} has changed"):
        local_arguments([BASE, "--revision=0123456789abcdef", f"--settings={ADAPTER}"])


def test_a_whole_model_in_a_bucket_is_served_from_a_folder(bucket: FakeGcs) -> None:
    model, name = local_arguments([BASE, "--served-model-name=digits"])
    assert contents(model) == OF_BASE and name == "--served-model-name=digits"


def test_other_arguments_are_vllms(tmp_path: Path) -> None:
    asked = ["team/model", "--revision=abc", "--max-model-len", "4096", '--mm-processor-kwargs={"a": 1}']
    assert local_arguments(asked) == asked
    assert local_arguments([str(tmp_path), "--port=1"]) == [str(tmp_path), "--port=1"]


def test_a_damaged_adapter_is_not_served(bucket: FakeGcs) -> None:
    open_storage(ADAPTER).write("adapter_model.safetensors", b"weights of the adaptex")
    with pytest.raises(DataError, match=r"adapter_model\.safetensors is damaged"):
        local_arguments([BASE, f"--settings={ADAPTER}"])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([], "the first argument is missing"),
        (["--port=1"], "the first argument is --port=1"),
        (["/nowhere", f"--settings={ADAPTER}"], "there is no folder /nowhere"),
        ([BASE, "--settings=/nowhere"], "there is no folder /nowhere"),
        ([BASE, "--lora-modules=digits=gs://bucket/nowhere"], "there is no model in gs://bucket/nowhere"),
    ],
)
def test_what_cannot_be_served_is_named(bucket: FakeGcs, asked: list[str], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_arguments(asked)
    assert caught.value.found.startswith(found)


def test_a_base_without_settings_of_a_run_is_refused(bucket: FakeGcs) -> None:
    open_storage("gs://bucket/bare").write("config.json", b"{}")
    with pytest.raises(ConfigError, match=r"has no tokenizer_config\.json"):
        local_arguments([BASE, "--settings=gs://bucket/bare"])


def test_the_program_becomes_the_server(bucket: FakeGcs, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text(STAND_IN)
    (tmp_path / "bin/vllm").chmod(0o755)
    for name, number in (("vllm", "0.32.0"), ("transformers", "5.19.0")):
        (tmp_path / f"lib/{name}-{number}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (tmp_path / f"lib/{name}-{number}.dist-info/METADATA").write_text(metadata)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin", "PYTHONPATH": f"{tmp_path}/lib:{ROOT}"}
    command = [sys.executable, "-m", "vlmpipe.trainer.serving.vllm_server", BASE, f"--settings={ADAPTER}", "--port=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said, answer = done.stdout.splitlines()
    assert said.startswith("vllm 0.32.0, transformers 5.19.0: vllm serve /"), "versions are in the container's log"
    arguments, served = json.loads(answer)
    assert (arguments[0], arguments[2:]) == ("serve", ["--port=1"])
    assert served == {name: data.decode() for name, data in SERVED.items()}
    (tmp_path / "lib/vllm-0.32.0.dist-info/METADATA").unlink()
    (tmp_path / "lib/vllm-0.32.0.dist-info").rmdir()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.UNAVAILABLE and "vllm is not installed here" in done.stderr
