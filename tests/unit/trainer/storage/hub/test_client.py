"""What keeps a model of the hub from being read is said in a sentence of its own, and a secret's token is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.utils import _http as client
from safetensors.torch import save
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from tests.fakes.hub import COMMIT, FakeHub, Repository, running_hub
from tests.fakes.receiver import Receiver
from tests.support.clock import replace_time
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer, pretrained_tokenizer
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained
from vlmpipe.trainer.models.hf_native.weight_files import read_in_passing, weight_files
from vlmpipe.trainer.models.published import published_json
from vlmpipe.trainer.secret_manager import use_hub_token
from vlmpipe.trainer.serving.vllm_server import _of_hub

CONTENT = b'{"model_type": "qwen2"}'
MODEL = WeightsConfig(weights="org/model")
TOKEN = "t" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub(org__model=Repository(content=CONTENT)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_TOKEN", "")  # restored afterwards
        monkeypatch.delenv("HF_TOKEN")
        yield server


def failure(model: WeightsConfig = MODEL) -> UserError:
    with pytest.raises(UserError) as caught:
        load_pretrained(AutoConfig, model)
    return caught.value


def test_a_public_model_is_read(hub: FakeHub) -> None:
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
    # At its commit, or at the branch: transformers asks for the commit at the endpoint set when a process
    # first asks for one, and does without where it gets no answer.
    assert {path.rpartition("/")[2] for path in hub.requests} == {"config.json"}


def test_each_reason_has_its_own_sentence(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/gated"] = Repository(content=CONTENT, readers=(TOKEN,), gated=True)
    gated = WeightsConfig(weights="org/gated")
    found = {"no token": failure(gated)}
    monkeypatch.setenv("HF_TOKEN", "of-somebody-else")
    found["no licence"] = failure(gated)
    found["no name"] = failure(WeightsConfig(weights="org/modle"))
    found["no revision"] = failure(WeightsConfig(weights="org/model", revision="v2"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found["offline"] = failure()
    assert {name: error.found for name, error in found.items()} == {
        "no token": "org/gated is gated, and no valid token was sent",
        "no licence": "org/gated is gated, and your account has no access",
        "no name": "the hub has no model org/modle that your token may read",
        "no revision": "org/model has no revision v2",
        "offline": "org/model is not on this machine, and HF_HUB_OFFLINE is set",
    }
    assert len({error.fix for error in found.values()}) == len(found), "and its own remedy"
    for name, code in (("no token", 77), ("no licence", 77), ("offline", 69)):
        assert found[name].code == code


@pytest.mark.slow
def test_a_hub_out_of_reach_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    error = failure()
    assert error.found == "org/model is not on this machine, and http://127.0.0.1:9 does not answer"
    assert error.code == ExitCode.UNAVAILABLE


def test_the_token_of_a_secret_opens_a_gated_model_and_is_not_printed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/model"] = Repository(content=CONTENT, readers=(TOKEN,), gated=True)
    with Receiver() as receiver:
        receiver.secrets = {"projects/p/secrets/hub/versions/latest": TOKEN}
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.endpoint)
        use_hub_token(None)
        assert "HF_TOKEN" not in os.environ
        use_hub_token("projects/p/secrets/hub")
        with pytest.raises(UserError, match=r"model.hub_token_secret: no permission to read projects/p/secrets/forbid"):
            use_hub_token("projects/p/secrets/forbidden")
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
    assert TOKEN not in "".join(capfd.readouterr())


def test_a_tokenizer_that_cannot_be_read_says_the_same(hub: FakeHub) -> None:
    hub.repositories["org/model"] = Repository(readers=(TOKEN,), gated=True)
    with pytest.raises(UserError, match="org/model is gated, and no valid token was sent"):
        make_tokenizer("org/model", [])


# ---- each fault of the hub beside each way in which its files are read

STOPS = {"eos_token_id": [1, 2]}
FILES = {
    "config.json": CONTENT,
    "generation_config.json": json.dumps(STOPS).encode(),
    SAFE_WEIGHTS_NAME: save({"a": torch.ones(2)}),
}


def weights() -> object:
    files = weight_files(MODEL)
    assert files.has(SAFE_WEIGHTS_NAME)
    with files.opened(SAFE_WEIGHTS_NAME) as file:
        return file.get_tensor("a").tolist()


def weights_in_passing() -> object:
    with read_in_passing():
        return weights()


READERS: dict[str, tuple[Callable[[], object], object]] = {
    "configuration": (lambda: load_pretrained(AutoConfig, MODEL).model_type, "qwen2"),
    "optional file": (lambda: published_json(MODEL, "generation_config.json"), STOPS),
    "weights": (weights, [1.0, 1.0]),
    "weights in passing": (weights_in_passing, [1.0, 1.0]),
    "base of a served adapter": (lambda: _of_hub("org/model", "").name, COMMIT),
}


def rename(hub: FakeHub) -> None:
    hub.repositories["org/new"] = hub.repositories.pop("org/model")
    hub.renamed["org/model"] = "org/new"


def limit(hub: FakeHub) -> None:
    hub.status, hub.limit = 429, {"RateLimit": '"resolvers";r=0;t=55', "RateLimit-Policy": '"window";q=3000;w=300'}


FAULTS: dict[str, tuple[Callable[[FakeHub], object], set[str], tuple[int, str, str]]] = {
    # readers that fail, with exit code, what was found and what to do
    "none": (lambda hub: None, set(), (0, "", "")),
    "it was renamed": (rename, set(), (0, "", "")),
    "a connection ends early": (lambda hub: hub.cut_off.append(3), set(), (0, "", "")),
    "every connection ends early": (
        lambda hub: hub.cut_off.extend([0] * 99), {*READERS}, (69, "no answer (RemoteProtocolError)", "try again")
    ),
    "it is disabled": (
        lambda hub: setattr(hub.repositories["org/model"], "disabled", True), {*READERS},
        (66, "is disabled on the hub, for every account", "choose another model"),
    ),
    "the token was deleted": (
        lambda hub: hub.no_tokens.add(TOKEN), {*READERS}, (77, "refuses your token for org/model (HTTP 401)", "renew")
    ),
    "too many requests": (limit, {*READERS}, (69, "HTTP 429, too many requests", "in 55 seconds; with a token")),
    "it fails": (lambda hub: setattr(hub, "status", 503), {*READERS}, (69, ": HTTP 503", "try again")),
    "a proxy answers": (
        lambda hub: setattr(hub, "is_hub", False), {*READERS}, (69, "what answers there is not the hub", "HF_ENDPOINT")
    ),
    "a proxy changes files": (
        lambda hub: setattr(hub, "shown_size", 10**6), {"weights", "base of a served adapter"},
        (69, "arrives with another size than announced", "proxy"),
    ),
    "no ranges": (
        lambda hub: setattr(hub, "gives_ranges", False), {"weights in passing"},
        (65, "bytes 0 to 8 of it arrive as", "copy the model there again"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_one_sentence_however_files_are_read(
    hub: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None of them reads as the absence of a file, which has a default."""
    fault, failing, (code, found, fix) = FAULTS[name]
    replace_time(monkeypatch, client, sleep=lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    original = Repository((*FILES,), contents=FILES)
    fault_of_reader = {}
    for reader, (read, value) in READERS.items():
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / reader))
        hub.repositories["org/model"] = original
        fault(hub)
        try:
            assert read() == value
        except UserError as error:
            assert (int(error.code), found in error.found, fix in error.fix) == (code, True, True), error
            fault_of_reader[reader] = error.found
    assert fault_of_reader.keys() == failing


def test_a_tokenizer_is_read_with_all_of_its_files_or_not_at_all(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a name, transformers makes one with another end token, or without its template."""
    published = make_tokenizer("train:300", [])
    published.chat_template = "{{ messages }}"
    published.save_pretrained(tmp_path / "published")
    files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()} | {"config.json": CONTENT}
    hub.repositories["org/model"] = Repository((*files,), contents=files)
    hub.status = 403
    for name in files:
        hub.only = name
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"without {name}"))
        with pytest.raises(UserError, match="HTTP 403"):
            pretrained_tokenizer("org/model")
    hub.status = 0
    found = pretrained_tokenizer("org/model")
    assert (found.eos_token, found.chat_template) == (published.eos_token, published.chat_template)


def test_a_hub_that_fails_gives_no_part_of_a_models_files(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes what an earlier program has left in the cache, where it knows no list of the commit's files."""
    published = make_tokenizer("train:300", [])
    published.save_pretrained(tmp_path / "published")
    files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()} | {"config.json": CONTENT}
    hub.repositories["org/model"] = Repository((*files,), contents=files)
    hf_hub_download("org/model", "tokenizer.json", cache_dir=tmp_path)
    replace_time(monkeypatch, client, sleep=lambda seconds: None)
    hub.status, hub.only = 503, "/revision/main"
    for read in (lambda: pretrained_tokenizer("org/model"), lambda: _of_hub("org/model", "")):
        with pytest.raises(UserError, match="HTTP 503"):
            read()
    hub.status = 0
    with monkeypatch.context() as without_network:
        without_network.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UserError, match=r"may be here in part only, and http://127\.0\.0\.1:9 does not") as caught:
            pretrained_tokenizer("org/model")
    assert "HF_HUB_OFFLINE=1" in caught.value.fix
    assert pretrained_tokenizer("org/model").eos_token == published.eos_token
    hub.status, hub.only = 503, ""
    assert pretrained_tokenizer("org/model").eos_token == published.eos_token, "all files are known to be here"


def test_files_that_another_program_did_not_download_are_named_offline(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/model"] = Repository(("config.json", "merges.txt", "vocab.json"), content=CONTENT)
    snapshot_download("org/model", allow_patterns=["*.json"], cache_dir=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        pretrained_tokenizer("org/model")
    assert caught.value.found == "org/model is here without merges.txt, and HF_HUB_OFFLINE is set"


def test_a_file_that_is_not_there_is_none_and_asked_for_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert published_json(MODEL, "generation_config.json") == {}
    assert hub.requests == ["/org/model/resolve/main/generation_config.json"]
    replace_time(monkeypatch, client, sleep=lambda seconds: None)
    hub.status = 503
    assert published_json(MODEL, "generation_config.json") == {}, "a run that has all files continues without the hub"


def test_a_model_that_was_downloaded_before_is_read_offline_as_its_error_says(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
    replace_time(monkeypatch, client, sleep=lambda seconds: None)
    hub.status = 503
    with pytest.raises(UserError, match="HTTP 503"):
        published_json(MODEL, "generation_config.json")  # which may be there
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(UserError, match=f"{hub.endpoint} does not answer") as caught:
        published_json(MODEL, "generation_config.json")
    assert "HF_HUB_OFFLINE=1" in caught.value.fix
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert published_json(MODEL, "generation_config.json") == {}
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
