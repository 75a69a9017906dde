"""The registry in Vertex AI Model Registry: Google's client against the strict local server, files in a fake bucket."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.retry import Retry

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.gcs import QUICK_RETRY
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_for_vertex
from tests.support.reports import make_run, write_export
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.sections.output import ServingConfig
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE, Place
from vlmpipe.pipelines.check import check_run
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.records.decision import Champion
from vlmpipe.records.registered import Registered
from vlmpipe.registry import folder as registry_module
from vlmpipe.registry import release as release_module
from vlmpipe.registry import vertex as vertex_models
from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.registry.release import decide_run, register_run, require_container
from vlmpipe.registry.vertex import VertexRegistry
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

REGISTRY_ROOT = "gs://bucket/root/registry"
PLACE = Place("test-project", "us-central1")
PARENT = PLACE.parent
SERVING = {
    "image_uri": f"us-docker.pkg.dev/test-project/serving/vllm@sha256:{'1' * 64}",
    "command": [], "args": ["{model_uri}"], "port": 8080, "predict_route": "/v1/chat/completions",
    "health_route": "/health", "env": {"A": "b"}, "shared_memory_size_mb": 16384, "deployment_timeout_s": 7200,
}  # fmt: skip
ON_VERTEX = ["register.registry=vertex://digits", f"register.serving={json.dumps(SERVING)}"]
DIGITS = ROOT / "configs/digits.yaml"


@pytest.fixture
def server(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    """Vertex AI and its bucket, as every part of the registry reaches them."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))

    def open_storage(uri: str) -> Storage:
        if uri.startswith("gs://"):
            return GcsStorage(uri, client=gcs_server.client(), retry=QUICK_RETRY)
        return LocalStorage(uri)

    for module in (registry_module, vertex_models, release_module):
        monkeypatch.setattr(module, "open_storage", open_storage)
    monkeypatch.setattr(retries, "RETRY", Retry(initial=0.01, maximum=0.05, timeout=5.0))
    monkeypatch.setattr(vertex_models, "SETTLE_S", 0.05)
    monkeypatch.setattr(vertex_models, "POLLING", vertex_models.DEFAULT_POLLING.with_delay(initial=0.01))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        yield running


def registry(alias: str = "champion", **changes: Any) -> VertexRegistry:
    return VertexRegistry(
        PLACE,
        "digits",
        REGISTRY_ROOT,
        alias=alias,
        serving=ServingConfig.model_validate({**SERVING, **changes}),
        labels={"team": "vision"},
    )


def candidate(folder: Path, run_id: str, checkpoint: str = "c1", exact_match: float = 0.9) -> Candidate:
    export = folder / run_id
    export.mkdir(exist_ok=True)
    (export / "model.safetensors").write_bytes(run_id.encode() * 100)
    metrics = {"exact_match": exact_match}
    return Candidate(
        run_id=run_id, export_uri=str(export), checkpoint=checkpoint, metrics=metrics, data_fingerprint="f3a9"
    )


def test_a_version_serves_the_quantized_export_that_is_asked_for_if_it_has_one(
    server: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ServingConfig.model_validate(SERVING)
    quantized = VertexRegistry(PLACE, "digits", REGISTRY_ROOT, alias="champion", serving=serving, quantized="int4")
    (tmp_path / "int4").mkdir()
    (tmp_path / "int4/model.safetensors").write_bytes(b"4" * 10)
    whole = candidate(tmp_path, "Run.1")
    entry = quantized.register("digits", whole.model_copy(update={"quantized": {"int4": str(tmp_path / "int4")}}), "#")
    assert entry.model_uri.endswith("/model") and entry.quantized["int4"] == f"{entry.model_uri}-int4"
    assert entry.quantized["int4"] in " ".join(quantized.arguments(entry.version))
    without = quantized.register("digits", candidate(tmp_path, "Run.2"), "#")
    assert f"{without.model_uri}-int4" not in " ".join(quantized.arguments(without.version))
    assert quantized.arguments(99) == ()

    monkeypatch.setattr(release_module, "open_registry", lambda _: (quantized, "digits", "champion"))
    registered = Registered(
        model="digits", version=entry.version, uri=entry.model_uri, resource=entry.resource, quantized=entry.quantized
    )
    for form in ("int4", None):
        deploy = DeployConfig.model_validate({"endpoint": "digits", "quantized": form})
        run: Any = SimpleNamespace(register_=SimpleNamespace(serving=None), deploy=deploy)
        if form:
            require_container(run, registered)
        else:
            with pytest.raises(ConfigError, match=r"registered to serve another export .* null"):
                require_container(run, registered)


def uploads(server: FakeVertex) -> int:
    return sum(request.startswith("POST") and ":upload" in request for request in server.requests)


def test_a_version_has_its_files_and_its_serving_container(server: FakeVertex, tmp_path: Path) -> None:
    assert registry().champion("digits") is None
    assert registry().versions("digits") == []
    entry = registry().register("digits", candidate(tmp_path, "Run.1"), "# card")
    (made,) = server.models.models["digits"]
    assert sum("/models/digits/operations/1" in request for request in server.requests) == 2  # under way, then done
    assert (entry.version, entry.resource) == (1, f"{PARENT}/models/digits@1")
    assert made.artifact_uri == entry.model_uri == f"{REGISTRY_ROOT}/digits/Run.1/model"
    assert dict(made.labels) == {"team": "vision", "vlmpipe-run": "run-1", "vlmpipe-data": "f3a9"}
    assert list(made.version_aliases) == ["default"]  # the service's own; ours comes with the promotion
    container = made.container_spec
    assert list(container.args) == [entry.model_uri]
    assert (container.image_uri, container.ports[0].container_port) == (SERVING["image_uri"], 8080)
    assert (container.shared_memory_size_mb, container.deployment_timeout) == (16384, dt.timedelta(hours=2))
    assert made.version_description == "run Run.1, exact match 0.9000"
    files = vertex_models.open_storage(entry.model_uri)
    assert {info.name for info in files.list()} == {"model.safetensors", "README.md"}
    assert files.list()[-1].crc32c == entry.files[0].crc32c


def test_versions_count_up_and_the_alias_moves_from_the_compared_one(server: FakeVertex, tmp_path: Path) -> None:
    for number, run_id in enumerate("abca"):
        assert registry().register("digits", candidate(tmp_path, run_id), "").version == number % 3 + 1
    assert uploads(server) == 3
    assert [entry.run_id for entry in registry().versions("digits")] == ["a", "b", "c"]
    registry().promote("digits", 1, instead_of=None)
    registry().promote("digits", 2, instead_of=1)
    registry().promote("digits", 2, instead_of=1)  # repeating one that went through is harmless
    with pytest.raises(UserError, match="is version 2, but version 3 was compared with version 1"):
        registry().promote("digits", 3, instead_of=1)
    champion = registry().champion("digits")
    assert champion is not None
    assert champion.as_champion() == Champion(version=2, run_id="b", checkpoint="c1", exact_match=0.9)
    assert [list(one.version_aliases) for one in server.models.models["digits"]] == [["default"], ["champion"], []]
    assert registry(alias="staging").champion("digits") is None


@pytest.mark.parametrize("action", ["drop_before", "drop_after", "status"])
@pytest.mark.parametrize("first", [True, False], ids=["first version", "next version"])
def test_a_lost_answer_makes_no_second_version(server: FakeVertex, tmp_path: Path, action: Any, first: bool) -> None:
    if not first:
        registry().register("digits", candidate(tmp_path, "before"), "")
    server.faults.append(Fault(action))
    entry = registry().register("digits", candidate(tmp_path, "a"), "")
    again = registry().register("digits", candidate(tmp_path, "a"), "")
    assert entry == again
    assert len(server.models.models["digits"]) == entry.version == (1 if first else 2)
    server.faults.append(Fault(action))
    registry().promote("digits", entry.version, instead_of=None)
    champion = registry().champion("digits")
    assert champion == entry


def test_a_step_that_was_killed_after_sending_finds_its_version(server: FakeVertex, tmp_path: Path) -> None:
    server.faults.append(Fault("drop_after"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vertex_models, "ATTEMPTS", 1)
        with pytest.raises(UserError, match="does not answer"):
            registry().register("digits", candidate(tmp_path, "a"), "")
    assert registry().register("digits", candidate(tmp_path, "a"), "").version == 1
    assert uploads(server) == len(server.models.models["digits"]) == 1


def test_a_refused_request_is_an_error_message_and_leaves_nothing(server: FakeVertex, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Vertex AI refuses the model: .* has no value"):
        registry(env={"A": ""}).register("digits", candidate(tmp_path, "a"), "")
    server.models.fail_next = "the service agent cannot read the bucket"
    with pytest.raises(ConfigError, match=r"refuses the model: .*cannot read the bucket"):
        registry().register("digits", candidate(tmp_path, "a"), "")
    assert not server.models.models.get("digits")
    assert vertex_models.open_storage(f"{REGISTRY_ROOT}/digits/a").stat("SENT") is None
    server.faults.append(Fault("status", code=403, message="aiplatform.models.upload"))
    with pytest.raises(UserError, match="no permission in project test-project"):
        registry().register("digits", candidate(tmp_path, "a"), "")
    assert registry().register("digits", candidate(tmp_path, "a"), "").version == 1


def test_a_run_that_has_trained_on_gets_a_version_for_each_checkpoint(server: FakeVertex, tmp_path: Path) -> None:
    for _ in range(2):
        first = registry().register("digits", candidate(tmp_path, "a"), "")
        later = registry().register("digits", candidate(tmp_path, "a", checkpoint="c2"), "")
        assert (first.version, later.version) == (1, 2) and first.model_uri != later.model_uri
    assert [entry.checkpoint for entry in registry().versions("digits")] == ["c1", "c2"]
    assert uploads(server) == 2


def test_a_champion_uploaded_by_another_tool_is_refused(server: FakeVertex, tmp_path: Path) -> None:
    registry().register("digits", candidate(tmp_path, "a"), "")
    registry().promote("digits", 1, instead_of=None)
    server.models.models["digits"][0].artifact_uri = "gs://bucket/elsewhere/model"
    with pytest.raises(ConfigError, match="digits@1 was not registered by vlmpipe"):
        registry().champion("digits")
    assert registry().versions("digits") == []


def test_of_concurrent_promotions_one_wins_and_a_dead_one_blocks_none(server: FakeVertex, tmp_path: Path) -> None:
    for run_id in "abc":
        registry().register("digits", candidate(tmp_path, run_id), "")
    store = vertex_models.open_storage(f"{REGISTRY_ROOT}/digits")
    store.create("MOVING-champion", json.dumps({"version": 9, "until_s": 0.0}).encode())
    registry().promote("digits", 1, instead_of=None)
    store.create("MOVING-champion", json.dumps({"version": 9, "until_s": 1e12}).encode())
    with pytest.raises(UserError, match="another run is moving the alias champion"):
        registry().promote("digits", 2, instead_of=1)
    store.delete("MOVING-champion")

    def promote(version: int) -> bool:
        try:
            registry().promote("digits", version, instead_of=1)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(2) as workers:
        won = list(workers.map(promote, [2, 3]))
    champion = registry().champion("digits")
    assert champion is not None
    assert sorted(won) == [False, True]
    assert won[champion.version - 2]


def use_vertex(run: Path) -> None:
    """The run's settings name the model registry; its registry's files are in the bucket."""
    settings = json.loads((run / "run.json").read_text())
    settings["register"] |= {"registry": "vertex://digits", "serving": SERVING}
    settings["gcp"] = {**settings.get("gcp", {}), "project": "test-project", "location": "us-central1"}
    settings["gcp"] |= {"labels": {}, "encryption_spec_key_name": ""}
    (run / "run.json").write_text(json.dumps(settings))


def test_the_gate_asks_the_alias_and_both_answers_are_acted_on(
    server: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    for name in ("decision.json", "registered.json"):
        (run / name).unlink()
    write_export(run)
    use_vertex(run)
    of = VertexRegistry.of
    monkeypatch.setattr(VertexRegistry, "of", lambda settings, _root_uri: of(settings, REGISTRY_ROOT))
    assert decide_run(str(run)).accepted
    entry = register_run(str(run))
    assert register_run(str(run)) == entry  # a repeated step changes nothing
    assert uploads(server) == 1
    registered = json.loads((run / "registered.json").read_text())
    assert registered["resource"] == entry.resource == f"{PARENT}/models/digits@1"
    assert list(server.models.models["digits"][0].version_aliases) == ["default", "champion"]

    worse = run.parent / "second"
    write_export(worse)
    for name in ("run.json", "evaluate.json", "summary.json", "prepared.json"):
        (worse / name).write_text((run / name).read_text())
    evaluation = {**json.loads((run / "evaluate.json").read_text()), "exact_match": 0.1}
    (worse / "evaluate.json").write_text(json.dumps(evaluation))
    settings = json.loads((run / "run.json").read_text())
    settings["run"]["run_id"] = "second"
    (worse / "run.json").write_text(json.dumps(settings))
    decision = decide_run(str(worse))
    assert not decision.accepted
    assert decision.champion is not None and decision.champion.version == 1
    with pytest.raises(ConfigError, match="was not accepted"):
        register_run(str(worse))
    assert len(server.models.models["digits"]) == 1


def digits(*overrides: str) -> RunConfig:
    return load_for_vertex(DIGITS, overrides)


def test_the_run_file_chooses_the_registry_and_refuses_invalid_ones(tmp_path: Path) -> None:
    config = digits(*ON_VERTEX)
    here = {finding.subject: finding for finding in check_run(config)}
    assert "a run on this machine cannot register in vertex://digits" in here["registry"].text
    in_cloud = digits(*ON_VERTEX, "output.root_uri=gs://example-bucket/vlmpipe")
    found = {finding.subject: finding for finding in check_run(in_cloud)}
    assert found["registry"].text.startswith("projects/example-project/locations/us-central1/models/digits, alias")
    with pytest.raises(RunFileError, match=r"register.serving: missing"):
        digits("register.registry=vertex://digits")
    with pytest.raises(RunFileError, match=r"register.registry"):
        digits("register.registry=vertex://Digits", ON_VERTEX[1])
    with pytest.raises(RunFileError, match="looks like a secret"):
        digits(ON_VERTEX[0], f"register.serving={json.dumps({**SERVING, 'env': {'HF_TOKEN': 'x'}})}")
    with pytest.raises(RunFileError, match="expected gs:// or vertex://MODEL_ID"):
        require_vertex(digits("register.registry=models"))
    local = json.dumps(digits(*ON_VERTEX).to_dict())
    compiled = compiled_settings(config, "local", str(tmp_path))
    with pytest.raises(ConfigError, match="Model Registry keeps models in Cloud Storage"):
        resolve(local, compiled, run_id="r")
    folder = digits(f"register.registry={tmp_path}/models")
    resolved = resolve(json.dumps(folder.to_dict()), compiled_settings(folder, "local", str(tmp_path)), run_id="r")
    settings = RunSettings.of_record(resolved.config.to_run_json(_paths(tmp_path)), "run.json")
    assert isinstance(release_module.open_registry(settings)[0], FolderRegistry)
    assert resolved.config.register_.registry == f"{tmp_path}/models"


def _paths(root: Path) -> Any:
    from vlmpipe.trainer.config.job import RunPaths

    return RunPaths(run_id="r", root_uri=str(root))
