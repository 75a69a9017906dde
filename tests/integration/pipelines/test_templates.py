"""`vlmpipe publish`, and starting from what was published: Google's real clients against a strict server."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.auth.exceptions import DefaultCredentialsError
from google.protobuf import json_format
from kfp.registry import RegistryClient

from tests.fakes.vertex.server import FakeVertex, Fault
from tests.fakes.vertex.templates import API, FILES, TOKEN, Token, redirect
from tests.support.command_line import Answer
from tests.support.vertex.submit_runs import CHEAP, CONFIG, MINE, Submit, commander, running_vertex
from vlmpipe.config.run_config import load_run_file
from vlmpipe.google_cloud import retries
from vlmpipe.pipelines import schedule as schedule_plan
from vlmpipe.pipelines.compile import Compiled, compile_pipeline
from vlmpipe.platforms.vertex import artifact_registry as template_registry
from vlmpipe.platforms.vertex import pipeline_job as vertex_job
from vlmpipe.platforms.vertex import submit
from vlmpipe.platforms.vertex.artifact_registry import Registry
from vlmpipe.platforms.vertex.templates import _read, publish
from vlmpipe.rehearsal.vertex.server import BILLING_LABEL
from vlmpipe.trainer import __version__
from vlmpipe.trainer.config.job import ANY_VALUE, GONE
from vlmpipe.trainer.errors import ExitCode, UserError

HOST = f"https://{FILES}/test-project/templates"
NAME = "llava-7b-zero2-spot"
LATEST = f"{HOST}/{NAME}/latest"
SCHEDULED = ["schedule.cron=0 3 * * 1"]


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        redirect(monkeypatch, server.endpoint)
        monkeypatch.setattr(template_registry, "credentials_for", lambda host: Token())
        yield server


@pytest.fixture
def vlmpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    """Any command in an empty folder, with a plan that costs little."""
    for planning in (submit, schedule_plan):
        monkeypatch.setattr(planning, "plan_config", lambda config: None)
        monkeypatch.setattr(planning, "spending_of", lambda config, answer: CHEAP)
    return commander(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A pipeline that can be started."""
    return compile_pipeline(
        load_run_file(CONFIG, [MINE, *SCHEDULED]), "vertex", tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    )


def test_a_pipeline_that_an_earlier_version_published_is_read(whole: Compiled) -> None:
    """Its run file holds every field of that time."""
    document = yaml.safe_load(whole.path.read_text())
    default = document["root"]["inputDefinitions"]["parameters"]["run_file"]
    run_file = json.loads(default["defaultValue"])
    for section, fields in GONE.items():
        run_file[section] |= {name: 1800 if value is ANY_VALUE else value for name, value in fields.items()}
    default["defaultValue"] = json.dumps(run_file)
    assert _read(json.dumps(document).encode(), LATEST)[1] == load_run_file(CONFIG, [MINE, *SCHEDULED])


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    """A pipeline in few bytes, and so in few milliseconds."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(f"pipelineInfo: {{name: {NAME}}}\n")
    return Compiled(path, NAME, steps=0, jobs=0)


@pytest.fixture
def changed(compiled: Compiled) -> Compiled:
    """The same pipeline in other bytes."""
    path = compiled.path.with_name("changed.yaml")
    path.write_bytes(compiled.path.read_bytes() + b"# changed\n")
    return replace(compiled, path=path)


def test_the_published_file_is_the_compiled_one(vertex: FakeVertex, vlmpipe: Submit, tmp_path: Path) -> None:
    answer: Answer = vlmpipe("publish", CONFIG, MINE, "--registry", HOST, "--tag", "reviewed", "--json")
    assert answer.code == 0, answer.out + answer.err
    (one,) = answer.json["published"]
    (((name, version), content),) = vertex.templates.files.items()
    assert content == (tmp_path / "build/pipelines" / f"{NAME}.vertex.yaml").read_bytes()
    assert (one["template"], one["uploaded"]) == (f"{HOST}/{name}/{version}", True)
    own = f"content-{version.removeprefix('sha256:')[:16]}"
    assert one["tags"] == dict.fromkeys((own, f"v{__version__}", "reviewed", "latest"), "new")
    assert vertex.templates.tags == {(NAME, tag): version for tag in one["tags"]}


def test_kfps_own_client_reads_the_registry_as_we_do(vertex: FakeVertex, compiled: Compiled, tmp_path: Path) -> None:
    version = publish(Registry(HOST), compiled, []).address.rpartition("/")[2]
    theirs = RegistryClient(HOST, auth=Token())
    assert theirs.get_tag(NAME, "latest")["version"].endswith(f"/versions/{version}")
    file = theirs.download_pipeline(NAME, tag="latest", file_name=str(tmp_path / "theirs.yaml"))
    assert Path(file).read_bytes() == compiled.path.read_bytes()
    assert theirs.upload_pipeline(str(compiled.path), tags=["x"]) == (NAME, Registry(HOST).version_of(NAME, "x"))


def test_publishing_again_sends_nothing(vertex: FakeVertex, compiled: Compiled) -> None:
    first = publish(Registry(HOST), compiled, ["x"])
    vertex.requests.clear()
    again = publish(Registry(HOST), compiled, ["x"])
    assert (again.address, again.uploaded, set(again.tags.values())) == (first.address, False, {"there"})
    assert {request.split()[0] for request in vertex.requests} == {"GET"}
    assert "is there already" in "\n".join(again.lines())


def test_latest_moves_and_the_old_version_stays(vertex: FakeVertex, compiled: Compiled, changed: Compiled) -> None:
    old, new = (publish(Registry(HOST), one, []) for one in (compiled, changed))
    assert (old.address != new.address, new.tags["latest"]) == (True, "moved")
    registry = Registry(HOST)
    assert registry.download(NAME, "latest") == changed.path.read_bytes()
    assert registry.download(NAME, old.address.rpartition("/")[2]) == compiled.path.read_bytes()


def test_equal_fingerprints_do_not_stand_for_equal_bytes(
    vertex: FakeVertex, compiled: Compiled, changed: Compiled
) -> None:
    publish(Registry(HOST), changed, [])
    own = publish(Registry(HOST), compiled, []).tags
    (tag,) = (tag for tag in own if tag.startswith("content-"))
    wrong = next(version for (_, version), data in vertex.templates.files.items() if data == changed.path.read_bytes())
    vertex.templates.tags[NAME, tag] = wrong
    assert publish(Registry(HOST), compiled, []).uploaded


@pytest.mark.parametrize("point", range(1, 7))
def test_publishing_again_completes_an_interrupted_one(
    vertex: FakeVertex, compiled: Compiled, point: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, asked = vertex.take_fault, iter(range(1, 99))
    refusal = Fault("status", code=403)
    monkeypatch.setattr(vertex, "take_fault", lambda *request: refusal if next(asked) == point else take(*request))
    with pytest.raises(UserError, match="roles/artifactregistry"):
        publish(Registry(HOST), compiled, [])
    published = publish(Registry(HOST), compiled, [])
    assert vertex.templates.uploads == 1
    assert set(vertex.templates.tags) == {(NAME, tag) for tag in published.tags}


@pytest.mark.parametrize("action", ["status", "drop_before", "drop_after", "reset"])
@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_a_passing_fault_passes(
    vertex: FakeVertex, compiled: Compiled, changed: Compiled, action: Any, method: str
) -> None:
    publish(Registry(HOST), compiled, [])
    vertex.faults.append(Fault(action, method=method, times=2))
    published = publish(Registry(HOST), changed, ["new-tag"])
    assert vertex.faults[0].times == 0
    assert {vertex.templates.tags[NAME, tag] for tag in published.tags} == {published.address.rpartition("/")[2]}
    assert len(vertex.templates.files) == 2


def test_a_tag_whose_making_was_not_answered_is_there_once(vertex: FakeVertex, compiled: Compiled) -> None:
    publish(Registry(HOST), compiled, [])
    vertex.faults.append(Fault("drop_after", "POST"))
    published = publish(Registry(HOST), compiled, ["mine"])
    assert (published.tags["mine"], published.uploaded) == ("moved", False)
    assert vertex.templates.tags[NAME, "mine"] == published.address.rpartition("/")[2]


FAULTS = {
    "no rights": (Fault("status", "GET", code=403, message="Permission 'x' denied"), 77, "artifactregistry.writer"),
    "switched off": (Fault("status", "GET", code=403, reason="SERVICE_DISABLED"), 69, "gcloud services enable"),
    "login ran out": (Fault("status", "GET", code=401, message="expired"), 67, "gcloud auth application-default login"),
    "bad request": (Fault("status", "POST", code=400, message="bad field z"), 64, "bad field z"),
    "taken just now": (Fault("status", "POST", code=409, times=9, message="conflict"), 69, "try again"),
    "quota": (Fault("status", "POST", code=429, message="quota of requests"), 69, "quota of requests"),
    "down": (Fault("status", "POST", code=503, times=999), 69, "does not answer"),
    "cut off": (Fault("drop_before", "GET", times=999), 69, "does not answer"),
}


@pytest.mark.parametrize(("fault", "code", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_a_sentence_and_a_code(
    vertex: FakeVertex, compiled: Compiled, fault: Fault, code: int, said: str
) -> None:
    vertex.faults.append(replace(fault))
    with pytest.raises(UserError) as caught:
        publish(Registry(HOST), compiled, [])
    assert (caught.value.code, said in caught.value.text(), "0x" in caught.value.text()) == (code, True, False)
    assert vertex.templates.files == {}


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        (f"https://{FILES}/other-project/templates/{NAME}/latest", 77, "or there is no such project"),
        (f"https://{FILES}/test-project/other/{NAME}/latest", 66, "gcloud artifacts repositories create other"),
        (f"{HOST}/{NAME}/nosuch", 66, f"Tag nosuch of package {NAME} was not found"),
        (f"{HOST}/{NAME}/sha256:{'0' * 64}", 66, "was not found"),
        (f"{HOST}/foreign/latest", 64, "is not a pipeline of vlmpipe"),
        (f"{HOST}/{NAME}", 64, "is not the address of a published pipeline"),
        ("https://example.com/pipeline.yaml", 64, "as vlmpipe publish prints it"),
    ],
)
def test_what_cannot_be_started_is_named(
    vertex: FakeVertex, vlmpipe: Submit, compiled: Compiled, address: str, code: int, said: str
) -> None:
    publish(Registry(HOST), compiled, [])
    foreign = compiled.path.with_name("foreign.yaml")
    foreign.write_text("pipelineInfo: {name: foreign}")
    publish(Registry(HOST), replace(compiled, path=foreign, name="foreign"), [])
    answer = vlmpipe("submit", address, "--detach")
    assert (answer.code, said in answer.err, vertex.jobs) == (code, True, {})


VERSION = "sha256:" + "0" * 64
CALLS: dict[str, Callable[[Registry, Path], object]] = {
    "upload": lambda registry, file: registry.upload(file, "latest"),
    "download": lambda registry, file: registry.download(NAME, "latest"),
    "look up": lambda registry, file: registry.version_of(NAME, "latest"),
    "tag": lambda registry, file: registry.put_tag(NAME, "latest", VERSION),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_registry_that_takes_requests_and_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, compiled: Compiled, call: Callable[[Registry, Path], object]
) -> None:
    monkeypatch.setattr(template_registry, "credentials_for", lambda host: Token())
    monkeypatch.setattr(retries, "RETRY", retries.RETRY.with_delay(0.01, 0.1).with_timeout(0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        redirect(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError) as caught:
            call(Registry(HOST, timeout_s=0.2), compiled.path)
    assert (caught.value.code, caught.value.found) == (ExitCode.UNAVAILABLE, f"{HOST} does not answer: Read timed out")


def test_a_run_and_a_schedule_start_from_a_tag_and_stay_with_its_version(
    vertex: FakeVertex, vlmpipe: Submit, whole: Compiled, tmp_path: Path
) -> None:
    published = publish(Registry(HOST), whole, [])
    answer = vlmpipe("submit", LATEST, "--detach")
    (job,) = vertex.jobs.values()
    content = json_format.MessageToDict(type(job).pb(job))
    kept = (tmp_path / "build/pipelines" / f"{NAME}.published.yaml").read_bytes()
    assert (answer.code, content["templateUri"], kept) == (0, published.address, whole.path.read_bytes())
    assert content["pipelineSpec"]["pipelineInfo"]["name"] == content["displayName"] == NAME
    assert content["labels"].keys() == {vertex_job.SUBMISSION_LABEL, BILLING_LABEL}
    assert published.address in answer.out

    assert vlmpipe("schedule", "apply", LATEST).code == 0
    assert vlmpipe("schedule", "plan", LATEST, "--json").json["action"] == "nothing"
    (live,) = vertex.schedules.schedules.values()
    assert live.create_pipeline_job_request.pipeline_job.template_uri == published.address


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", LATEST, "train.epochs=2"), "it runs as it was published"),
        (("run", LATEST), "no run file"),
        (("publish", CONFIG, "--registry", "us-central1-docker.pkg.dev/p/r"), "with the format KFP"),
        (("publish", CONFIG), "VERTEX_TEMPLATE_REGISTRY"),
        (("publish", CONFIG, "--registry", HOST, "--tag", "sha256:0"), "cannot be a tag"),
        (("publish", CONFIG, "--registry", HOST, "--tag", "content-0"), "cannot be a tag"),
        (("publish", CONFIG, "--registry", HOST, *(f"--tag=t{n}" for n in range(6))), "too many"),
    ],
)
def test_invalid_arguments_send_no_request(
    vertex: FakeVertex, vlmpipe: Submit, arguments: tuple[str, ...], said: str
) -> None:
    answer = vlmpipe(*arguments)
    assert (answer.code, said in answer.err, vertex.requests) == (64, True, [])


def test_no_login_is_a_sentence(vertex: FakeVertex, monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    monkeypatch.setattr(template_registry, "credentials_for", lambda host: Token("unknown"))
    with pytest.raises(UserError, match="no usable Google Cloud credentials") as caught:
        publish(Registry(HOST), compiled, [])
    assert caught.value.code == ExitCode.NO_LOGIN
    monkeypatch.undo()

    def none(**options: Any) -> None:
        raise DefaultCredentialsError("none were found")

    monkeypatch.setattr("google.auth.default", none)
    with pytest.raises(UserError, match="none were found") as caught:
        Registry(HOST)
    assert caught.value.code == ExitCode.NO_LOGIN


TAGS = f"/v1/projects/test-project/locations/us-central1/repositories/templates/packages/{NAME}/tags"
REFUSED = {
    "a part that is not known": (FILES, "POST", "/test-project/templates", {"content": "{c}", "x": "1"}, 400),
    "no file": (FILES, "POST", "/test-project/templates", {"tags": "a"}, 400),
    "no pipeline": (FILES, "POST", "/test-project/templates", {"content": "a: 1"}, 400),
    "a short name": (FILES, "POST", "/test-project/templates", {"content": "pipelineInfo: {name: abc}"}, 400),
    "nine tags": (FILES, "POST", "/test-project/templates", {"content": "{c}", "tags": "a,b,c,d,e,f,g,h,i"}, 400),
    "a tag like a version": (FILES, "POST", "/test-project/templates", {"content": "{c}", "tags": "sha256:1"}, 400),
    "an update of another field": (API, "PATCH", f"{TAGS}/latest?updateMask=name", {"version": "{v}"}, 400),
    "an update of a field that is not there": (
        API,
        "PATCH",
        f"{TAGS}/latest?updateMask=version",
        {"versions": ""},
        400,
    ),
    "a version without its package": (API, "PATCH", f"{TAGS}/latest?updateMask=version", {"version": "sha256:1"}, 400),
    "a tag twice": (API, "POST", f"{TAGS}?tagId=latest", {"version": "{v}"}, 409),
    "a tag of nothing": (API, "PATCH", f"{TAGS}/none?updateMask=version", {"version": "{v}"}, 404),
    "nothing to download": (FILES, "GET", f"/test-project/templates/{NAME}/none", {}, 404),
    "a version that was not uploaded": (FILES, "GET", f"/test-project/templates/{NAME}/sha256:{'0' * 64}", {}, 404),
    "another repository's file": (FILES, "GET", f"/test-project/others/{NAME}/latest", {}, 404),
    "another project's file": (FILES, "GET", f"/other/templates/{NAME}/latest", {}, 403),
    "a query beside a file": (FILES, "GET", f"/test-project/templates/{NAME}/latest?alt=media", {}, 400),
    "a tag with a space": (FILES, "POST", "/test-project/templates", {"content": "{c}", "tags": "a b"}, 400),
    "a tag of 129 characters": (FILES, "POST", "/test-project/templates", {"content": "{c}", "tags": "a" * 129}, 400),
    "no YAML": (FILES, "POST", "/test-project/templates", {"content": "a: ["}, 400),
    "another project's tag": (API, "GET", TAGS.replace("test-project", "other") + "/latest", {}, 403),
    "another location's tag": (API, "GET", TAGS.replace("us-central1", "asia-east1") + "/latest", {}, 404),
    "another package's tag": (API, "GET", TAGS.replace(NAME, "other-name") + "/latest", {}, 404),
    "a tag without its name": (API, "POST", TAGS, {"version": "{v}"}, 400),
    "a tag on a version that is not there": (
        API,
        "POST",
        f"{TAGS}?tagId=new",
        {"version": "{p}versions/sha256:" + "0" * 64},
        404,
    ),
    "a tag's deletion": (API, "DELETE", f"{TAGS}/latest", {}, 400),
    "a route that is not known": (API, "GET", TAGS.removesuffix("tags"), {}, 501),
}


@pytest.mark.parametrize(("host", "method", "path", "fields", "code"), REFUSED.values(), ids=REFUSED)
def test_the_server_is_strict(
    vertex: FakeVertex, compiled: Compiled, host: str, method: str, path: str, fields: dict[str, str], code: int
) -> None:
    version = publish(Registry(HOST), compiled, []).address.rpartition("/")[2]
    before = (dict(vertex.templates.tags), len(vertex.templates.files))
    content = compiled.path.read_text()
    full = f"{TAGS.removeprefix('/v1/').removesuffix('tags')}versions/{version}"
    prefix = full.rpartition("versions/")[0]
    values = {
        key: value.replace("{v}", full).replace("{c}", content).replace("{p}", prefix) for key, value in fields.items()
    }
    if host == API:
        headers, body = {"Content-Type": "application/json"}, json.dumps(values)
    else:
        headers = {"Content-Type": "multipart/form-data; boundary=edge"}
        parts = (f'Content-Disposition: form-data; name="{key}"\r\n\r\n{text}' for key, text in values.items())
        body = "".join(f"--edge\r\n{part}\r\n" for part in parts) + "--edge--\r\n"
    connection = http.client.HTTPConnection(vertex.endpoint.removeprefix("http://"), timeout=10)
    connection.request(method, path, body, headers | {"Host": host, "Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == code
    assert (vertex.templates.tags, len(vertex.templates.files)) == before
    connection.close()
