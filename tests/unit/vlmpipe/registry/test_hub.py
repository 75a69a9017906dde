"""Uploads of registered models by the hub's real client, to a strict server on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from kfp.dsl import Model

from tests.fakes.hub_uploads import UploadHub, running_upload_hub
from tests.fakes.receiver import Receiver
from tests.support.reports import make_run, write_json
from vlmpipe.components.register_model import register_model
from vlmpipe.registry.hub import upload_registered
from vlmpipe.registry.release import decide_run, register_run
from vlmpipe.trainer import secret_manager
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import write_description
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import read_record_file

TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"
MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}
CARD = "README.md"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with running_upload_hub(**{TOKEN: "team"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its protocol has other servers
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An accepted run that was not registered."""
    run = make_run(tmp_path)
    (run / "registered.json").unlink()
    settings = json.loads((run / "run.json").read_text())
    settings["register"]["hub"] = {"repo_id": "team/digits"}
    write_json(run / "run.json", settings)
    export(run, MODEL)
    decide_run(str(run))
    return run


def export(run: Path, files: dict[str, bytes]) -> None:
    folder = run / "export"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_description(open_storage(str(run)), {"files": {name: asdict(FileSum.of(folder / name)) for name in files}})


def edit_hub(run: Path, **changes: Any) -> None:
    settings = json.loads((run / "run.json").read_text())
    settings["register"]["hub"] |= changes
    write_json(run / "run.json", settings)


def registered(run: Path) -> dict[str, Any]:
    register_run(str(run))
    upload_registered(str(run))
    return dict(read_record_file(run / "registered.json"))


def failure(run: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        upload_registered(str(run))
    return caught.value


def test_a_registered_model_and_its_card_are_one_private_commit(
    run: Path, hub: UploadHub, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    register_model(str(run), model)
    written = read_record_file(run / "registered.json")
    repository = hub.repositories["team/digits"]
    branch = repository.branches["main"]
    assert repository.private and branch.commits[1:] == [f"digits version 1, run {run.name}"]
    assert {name: branch.files[name] for name in MODEL} == MODEL
    assert set(branch.files) == {*MODEL, CARD, ".gitattributes"}
    assert branch.files[CARD] == Path(written["uri"], CARD).read_bytes()
    assert written["hub"] == {"repo_id": "team/digits", "revision": "main", "commit": branch.head}
    address = f"{hub.endpoint}/team/digits/commit/{branch.head}"
    assert model.metadata["hub_commit"] == address
    assert address in json.loads((run / "steps/register-model.json").read_text())["message"]
    assert TOKEN not in "".join(capfd.readouterr())
    assert not [path for path in run.parents[1].rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_repeated_step_makes_no_commit(run: Path, hub: UploadHub) -> None:
    first = registered(run)
    hub.requests.clear()
    assert registered(run) == first
    assert not [request for request in hub.requests if "/commit/" in request or request.startswith("PUT")]
    assert len(hub.repositories["team/digits"].branches["main"].commits) == 2


def test_files_of_the_former_model_go_and_others_stay(run: Path, hub: UploadHub) -> None:
    registered(run)
    branch = hub.repositories["team/digits"].branches["main"]
    branch.files |= {"adapter_config.json": b"{}", "LICENSE": b"mine", "pictures/one.json": b"{}", CARD: b"old"}
    upload_registered(str(run))
    assert set(branch.files) == {*MODEL, CARD, ".gitattributes", "LICENSE", "pictures/one.json"}
    assert branch.files[CARD] != b"old"


def test_another_branch_is_made(run: Path, hub: UploadHub) -> None:
    edit_hub(run, revision="candidates/next", private=False)
    decide_run(str(run))
    assert registered(run)["hub"]["revision"] == "candidates/next"
    repository = hub.repositories["team/digits"]
    assert not repository.private and len(repository.branches["main"].commits) == 1
    assert MODEL.items() <= repository.branches["candidates/next"].files.items()


def test_a_new_branch_starts_at_main_whose_model_goes(run: Path, hub: UploadHub) -> None:
    registered(run)
    main = hub.repositories["team/digits"].branches["main"]
    main.files |= {"former.safetensors": b"old", "LICENSE": b"mine"}
    edit_hub(run, revision="next")
    upload_registered(str(run))
    there = hub.repositories["team/digits"].branches["next"].files
    assert "LICENSE" in there and "former.safetensors" not in there and "former.safetensors" in main.files


def test_weights_that_the_client_leaves_out_in_silence_are_named(run: Path, hub: UploadHub) -> None:
    """Its commit skips what the repository's .gitignore names, with a line of its log at the level of debugging."""
    registered(run)
    branch = hub.repositories["team/digits"].branches["main"]
    branch.files = {".gitignore": b"checkpoint-*\n*.safetensors\n"}
    error = failure(run)
    assert error.found.endswith("/team/digits lacks 1 of 3 files of the model after its commit: model.safetensors")
    assert "`.gitignore`" in error.fix and error.code == ExitCode.CONFIG
    branch.files[".gitignore"] = b"checkpoint-*\n"
    upload_registered(str(run))
    assert branch.files["model.safetensors"] == MODEL["model.safetensors"]


def test_a_large_tokenizer_is_sent_as_a_large_file(run: Path, hub: UploadHub) -> None:
    export(run, MODEL | {"tokenizer.json": b" " * 5_000_001})
    decide_run(str(run))
    registered(run)
    assert len(hub.repositories["team/digits"].branches["main"].files["tokenizer.json"]) == 5_000_001
    assert len(hub.large) == 2


def test_an_adapter_is_a_peft_folder_that_names_its_base(run: Path, hub: UploadHub) -> None:
    settings = json.loads((run / "run.json").read_text())
    settings["model"] = {
        "pretrained": {"weights": "org/base"}, "tokenizer": "org/base", "family": "qwen2_5_vl",
        "max_pixels": 3136, "lora": {"rank": 4, "export": "adapter"},
    }  # fmt: skip
    write_json(run / "run.json", settings)
    (run / "export/config.json").unlink()
    (run / "export/model.safetensors").unlink()
    adapter = {
        "adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"}).encode(),
        "adapter_model.safetensors": b"adapter",
    }
    export(run, adapter)
    decide_run(str(run))
    registered(run)
    files = hub.repositories["team/digits"].branches["main"].files
    assert adapter.items() <= files.items() and "config.json" not in files
    metadata = yaml.safe_load(files[CARD].split(b"---\n")[1])
    assert (metadata["library_name"], metadata["base_model"]) == ("peft", ["org/base"])
    assert metadata["base_model_relation"] == "adapter"


def test_a_token_of_its_own_is_read_from_its_secret(run: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "projects/p/secrets/hub"
    register_run(str(run))
    edit_hub(run, token_secret=name)
    monkeypatch.setenv("HF_TOKEN", "that-may-only-read")
    with Receiver() as receiver:
        monkeypatch.setattr(secret_manager, "SECRET_MANAGER", receiver.endpoint)
        receiver.secrets = {f"{name}/versions/latest": TOKEN}
        upload_registered(str(run))
        receiver.secrets = {}
        assert failure(run).found.startswith("register.hub.token_secret: Secret Manager answers 404")
    assert len(hub.repositories["team/digits"].branches["main"].commits) == 2
    assert os.environ["HF_TOKEN"] == "that-may-only-read"


def test_a_rejected_model_is_not_uploaded(run: Path, hub: UploadHub) -> None:
    settings = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**settings, "gate": {"min_exact_match": 1.0}})
    assert not decide_run(str(run)).accepted
    with pytest.raises(SystemExit) as caught:
        register_model(str(run), Model())
    assert caught.value.code == ExitCode.CONFIG
    with pytest.raises(ConfigError, match=r"no .*registered\.json"):
        upload_registered(str(run))
    assert hub.requests == [] and hub.repositories == {}


def test_each_reason_has_its_own_sentence(run: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    register_run(str(run))
    found = {}
    monkeypatch.setenv("HF_TOKEN", "")
    found["no token"] = failure(run)
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "of-nobody")
    found["unknown token"] = failure(run)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    edit_hub(run, repo_id="others/digits")
    found["another account"] = failure(run)
    edit_hub(run, repo_id="team/digits", private=False)
    nothing, hub.meanwhile = hub.meanwhile, lambda branch: branch.commits.append("of somebody else")
    found["overtaken"] = failure(run)
    hub.meanwhile = nothing
    upload_registered(str(run))
    edit_hub(run, private=True)
    found["public"] = failure(run)
    hub.status = 503
    found["out of order"] = failure(run)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found["offline"] = failure(run)
    address = f"{hub.endpoint}/team/digits"
    assert {name: error.found for name, error in found.items()} == {
        "no token": "no token to upload to team/digits: HF_TOKEN is not set",
        "unknown token": f"the hub refuses to write to {address} with this token "
        "(HTTP 401, Invalid username or password.)",
        "another account": f"the hub refuses to write to {hub.endpoint}/others/digits with this token "
        "(HTTP 403, no rights to create a model under the namespace others)",
        "overtaken": f"{address} changed during the upload "
        "(HTTP 412, A commit has happened since. Please refresh and try again.)",
        "offline": f"cannot upload to {address}: HF_HUB_OFFLINE is set",
        "public": "team/digits is public, and register.hub.private is true",
        "out of order": f"cannot upload to {address}: HTTP 503, out of order",
    }
    codes = {name: error.code for name, error in found.items()}
    assert codes == {
        "no token": 77, "unknown token": 77, "another account": 77, "overtaken": 69, "public": ExitCode.CONFIG,
        "out of order": 69, "offline": 69,
    }  # fmt: skip
    assert all(error.fix for error in found.values())
    assert "hub" in read_record_file(run / "registered.json"), "of the upload that was done"


def test_a_hub_that_is_not_there_is_a_sentence(run: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    register_run(str(run))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = failure(run)
    assert error.found == "cannot upload to http://127.0.0.1:9/team/digits: ConnectError"
    assert error.code == ExitCode.UNAVAILABLE
