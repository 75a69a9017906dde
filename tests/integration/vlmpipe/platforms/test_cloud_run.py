"""Deployment on Cloud Run: Google's client against the strict local server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.run_v2 import types as api
from google.oauth2 import id_token

from tests.fakes.cloud_run.server import FakeCloudRun
from tests.support.vertex.cloud_run import MODEL, PLACE, cloud_run, deploy_of, deployed, made, service_of
from tests.support.vertex.endpoints import asked_questions, right, wrong
from vlmpipe.platforms.vertex.cloud_run import client, form, service
from vlmpipe.platforms.vertex.cloud_run.client import caller_headers
from vlmpipe.platforms.vertex.cloud_run.service import MADE_BY, CloudRunService
from vlmpipe.rehearsal.vertex.messages import as_dict
from vlmpipe.serving import waking
from vlmpipe.serving.agreement import measure_agreement
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudRun]:
    with cloud_run(monkeypatch) as running:
        yield running


def kept_traffic(server: FakeCloudRun) -> list[api.TrafficTarget]:
    return list(server.services["digits"].service.traffic)


def tags_of_others(server: FakeCloudRun) -> list[tuple[str, str]]:
    return [(target.revision, target.tag) for target in kept_traffic(server)[:2]]


def test_the_first_model_makes_a_private_service_that_sleeps_and_takes_all_traffic(server: FakeCloudRun) -> None:
    split = deployed("run-1", min_replicas=0, max_replicas=3)
    assert server.traffic("digits") == {1: 100} and list(split.values()) == [100]
    kept = server.services["digits"].service
    assert not kept.invoker_iam_disabled and not any(":setIamPolicy" in request for request in server.requests)
    assert (kept.scaling.min_instance_count, kept.template.scaling.max_instance_count) == (0, 3)
    assert dict(kept.labels) == {"team": "vision"} and MADE_BY not in kept.annotations
    assert not any(target.tag for target in kept.traffic)


def test_the_instance_has_its_gpu_and_reads_the_model_from_its_mounted_bucket(server: FakeCloudRun) -> None:
    deployed("run-1", cloud_run={"cpu": 4, "concurrency": 32, "zonal_redundancy": True}, env={"VLLM_LOGGING": "1"})
    template = server.services["digits"].service.template
    (container,) = template.containers
    assert container.args[0] == "/buckets/registry/digits/run-1/model"
    assert list(container.args[1:]) == MODEL[1:]
    assert dict(container.resources.limits) == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert not container.resources.cpu_idle and template.node_selector.accelerator == "nvidia-l4"
    assert (template.volumes[0].gcs.bucket, template.volumes[0].gcs.read_only) == ("registry", True)
    assert container.volume_mounts[0].mount_path == "/buckets/registry"
    assert template.max_instance_request_concurrency == 32 and not template.gpu_zonal_redundancy_disabled
    assert container.startup_probe.failure_threshold * container.startup_probe.period_seconds == 1800
    assert {"LD_LIBRARY_PATH", "VLLM_LOGGING"} == {variable.name for variable in container.env}


def test_every_bucket_of_the_arguments_is_mounted_once() -> None:
    arguments = ["gs://base/qwen", "--lora-modules=m=gs://registry/a/b", "--settings=gs://registry/a/b", "--x=1"]
    assert form.mounted(arguments) == (
        ["/buckets/base/qwen", "--lora-modules=m=/buckets/registry/a/b", "--settings=/buckets/registry/a/b", "--x=1"],
        ["base", "registry"],
    )


def test_a_second_model_is_asked_at_its_own_address_and_then_replaces_the_first(server: FakeCloudRun) -> None:
    deployed("run-1")
    server.asked.clear()
    run, questions = service_of(), asked_questions()
    with run.canary(MODEL, "run-2") as candidate:
        assert server.traffic("digits") == {1: 80, 2: 20}
        measure_agreement(questions, run.ask(candidate, "digits"))
    assert server.asked == [candidate.revision] * 10
    assert run.promote(candidate) == {candidate.revision: 100}
    assert server.traffic("digits") == {2: 100}


def test_a_share_of_the_traffic_leaves_the_others_theirs_and_tags_of_others_stay(server: FakeCloudRun) -> None:
    deployed("run-1")
    kept = server.services["digits"].service
    kept.traffic = [*kept.traffic, api.TrafficTarget(type_=2, revision=server.made[0], tag="stable")]
    deployed("run-2", traffic_percent=30)
    assert server.traffic("digits") == {1: 70, 2: 30}
    assert [target.tag for target in server.services["digits"].service.traffic] == ["", "stable", ""]


def test_tags_of_others_stay_whatever_their_name_and_their_revision(server: FakeCloudRun) -> None:
    deployed("run-1")
    kept, own = server.services["digits"].service, server.made[0]
    tags = [api.TrafficTarget(type_=2, revision=own, tag=tag) for tag in ("candidate", "stable")]
    kept.traffic = [*kept.traffic, *tags]
    assert list(deployed("run-1").values()) == [100], "a step that is repeated"
    assert tags_of_others(server) == [(own, "candidate"), (own, "stable")]
    deployed("run-2")
    assert server.traffic("digits") == {2: 100}
    assert tags_of_others(server) == [(own, "candidate"), (own, "stable")]
    server.answers[3] = wrong
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-3")
    assert server.traffic("digits") == {2: 100}
    assert [target.tag for target in kept_traffic(server)] == ["candidate", "stable", ""]


def test_a_service_of_others_that_serves_nothing_is_refused_before_anything_is_sent(server: FakeCloudRun) -> None:
    server.fail_next = "The user-provided container failed the configured startup probe checks."
    others = made()
    others.traffic = [api.TrafficTarget(type_=1, percent=100)]
    server.create({"serviceId": "digits"}, json.dumps(as_dict(others)).encode())
    with pytest.raises(ConfigError, match=r"no revision of .*services/digits is ready"):
        deployed("run-1")
    assert len(server.made) == 1 and "digits" in server.services


def test_traffic_to_the_latest_revision_stays_with_it_when_there_is_a_later_one(server: FakeCloudRun) -> None:
    deployed("run-1")
    server.services["digits"].service.traffic = [api.TrafficTarget(type_=1, percent=100)]
    server.answers[2] = wrong
    with pytest.raises(UserError) as caught:
        deployed("run-2")
    assert caught.value.code == ExitCode.REJECTED and server.traffic("digits") == {1: 100}


def test_a_model_that_answers_otherwise_leaves_the_traffic_as_it_was(server: FakeCloudRun) -> None:
    server.answers = {1: wrong, 2: right, 3: wrong}
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-1")
    assert server.services == {}, "a service that was made for it is gone"
    deployed("run-2")
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-3")
    assert server.traffic("digits") == {2: 100}
    assert [target.tag for target in server.services["digits"].service.traffic] == [""]


def test_a_refused_model_keeps_no_instances_and_an_accepted_one_has_its_own(
    server: FakeCloudRun, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed("run-1", min_replicas=0)
    scaling = server.services["digits"].service.scaling
    server.answers[2] = wrong
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-2", min_replicas=1)
    assert server.services["digits"].service.scaling == scaling
    deployed("run-3", min_replicas=2, max_replicas=3)
    assert server.services["digits"].service.scaling.min_instance_count == 2
    server.answers[4] = wrong
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-4", min_replicas=1, max_replicas=1)
    assert server.traffic("digits") == {3: 100} and "keeps 1 instances at least, and kept 2" in capsys.readouterr().err


def test_a_service_that_another_run_has_made_in_between_stays(
    server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, others = CloudRunService._get, ["run-2"]

    def overtaken(this: CloudRunService) -> api.Service | None:
        result = get(this)
        if result is None and others:
            deployed(others.pop())
        return result

    monkeypatch.setattr(CloudRunService, "_get", overtaken)
    with pytest.raises(UserError, match="already exists"), service_of().canary(MODEL, "run-1"):
        pass
    assert server.traffic("digits") == {1: 100}


def test_a_run_that_is_overtaken_takes_no_traffic_and_deletes_nothing(server: FakeCloudRun) -> None:
    run = service_of()
    with pytest.raises(UserError, match="wrong answers"), run.canary(MODEL, "run-1"):
        deployed("run-2")
        raise UserError("wrong answers")
    assert server.traffic("digits") == {2: 100}
    with run.canary(MODEL, "run-3") as candidate:
        deployed("run-4")
    with pytest.raises(UserError, match=f"no longer has {candidate.revision} under test"):
        run.promote(candidate)
    assert server.traffic("digits") == {4: 100}


def test_a_service_of_a_killed_run_goes_with_the_next_model_that_is_refused(
    server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(CloudRunService, "_undo", lambda *_: None)
        with pytest.raises(KeyboardInterrupt), service_of().canary(MODEL, "run-1"):
            raise KeyboardInterrupt
    server.answers[2] = wrong
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-2")
    assert server.services == {}, "none of its models has passed a test"


def test_a_revision_that_does_not_start_is_an_error_with_the_services_words(server: FakeCloudRun) -> None:
    deployed("run-1")
    server.fail_next = "The user-provided container failed the configured startup probe checks."
    with pytest.raises(UserError, match="failed the configured startup probe"):
        deployed("run-2")
    assert server.traffic("digits") == {1: 100}


def test_an_attempt_that_ended_halfway_is_continued(server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a killed step, which undoes nothing."""
    with monkeypatch.context() as killed:
        killed.setattr(CloudRunService, "_undo", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt), service_of().canary(MODEL, "run-1"):
            raise KeyboardInterrupt
    assert server.services["digits"].service.annotations[MADE_BY] == "run-1"
    server.answers[1] = wrong
    with pytest.raises(UserError, match="1 of 10"):
        deployed("run-1")
    assert server.services == {} and len(server.made) == 1, "the same revision, of a service that the run made"


def test_questions_wait_for_an_instance_to_start(server: FakeCloudRun) -> None:
    server.waking = 3
    deployed("run-1", min_replicas=0)
    assert server.traffic("digits") == {1: 100}


@pytest.mark.parametrize(
    ("status", "code"), [(403, ExitCode.NO_PERMISSION), (503, ExitCode.UNAVAILABLE), (400, ExitCode.DATA)]
)
def test_a_service_that_refuses_questions_is_an_error_that_leaves_nothing(
    server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    monkeypatch.setattr(waking, "WAKING_S", 0.05)
    server.refuses = status
    with pytest.raises(UserError) as caught:
        deployed("run-1")
    assert caught.value.code == code and server.services == {}


def test_a_change_in_between_is_not_overwritten(server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed("run-1")
    run, get = service_of(), CloudRunService._get

    def changed(this: CloudRunService) -> api.Service | None:
        result = get(this)
        server.services["digits"].etag += 1
        return result

    monkeypatch.setattr(CloudRunService, "_get", changed)
    with pytest.raises(UserError, match="changed in between"), run.canary(MODEL, "run-2"):
        pass
    assert server.traffic("digits") == {1: 100}


@pytest.mark.parametrize("member", ["allUsers", "allAuthenticatedUsers"])
def test_a_service_that_everybody_may_call_is_refused_before_anything_is_sent(
    server: FakeCloudRun, member: str
) -> None:
    deployed("run-1")
    server.policy = ["serviceAccount:a@b.iam.gserviceaccount.com", member]
    with pytest.raises(ConfigError, match="everybody may call"):
        deployed("run-2")
    server.policy = ["serviceAccount:a@b.iam.gserviceaccount.com"]
    server.services["digits"].service.invoker_iam_disabled = True
    with pytest.raises(ConfigError, match="everybody may call"):
        deployed("run-2")
    assert len(server.made) == 1


def test_a_service_of_its_network_only_is_refused(server: FakeCloudRun) -> None:
    deployed("run-1")
    server.services["digits"].service.ingress = api.IngressTraffic.INGRESS_TRAFFIC_INTERNAL_ONLY
    with pytest.raises(ConfigError, match="INTERNAL_ONLY"):
        deployed("run-2")


def test_questions_that_are_too_large_are_refused_before_anything_is_deployed(
    server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SimpleNamespace(max_request_bytes=100)
    monkeypatch.setattr(service, "load_cloud_run", lambda: limits)
    questions = asked_questions()
    with pytest.raises(DataError, match=r"10 of 10 validation questions are too large .*services/digits"):
        service_of().require_usable(questions, "digits")
    assert server.made == []


def test_errors_of_the_api_name_cloud_run_and_its_role(server: FakeCloudRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        from vlmpipe.rehearsal.http_server import ApiError

        raise ApiError(403, "Permission 'run.services.get' denied")

    monkeypatch.setattr(server, "answer", broken)
    with pytest.raises(UserError, match=r"no permission in project test-project") as caught:
        deployed("run-1")
    assert caught.value.code == ExitCode.NO_PERMISSION and "roles/run.developer" in caught.value.text()


def test_callers_show_an_id_token_for_the_service_also_at_an_address_of_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    audiences = []

    def fetch(audience: str, request: object) -> SimpleNamespace:
        audiences.append(audience)
        return SimpleNamespace(before_request=lambda _, __, ___, headers: headers.update(authorization="Bearer token"))

    monkeypatch.setattr(id_token, "fetch_id_token_credentials", fetch)
    monkeypatch.setattr(client, "is_local", lambda _: False)
    run = CloudRunService.__new__(CloudRunService)
    run._place = PLACE
    address = "https://candidate---digits-1-uc.a.run.app"
    run.ask(service.Candidate("digits-1", address, "https://digits-1-uc.a.run.app", ()), "digits")
    assert audiences == ["https://digits-1-uc.a.run.app"]
    assert caller_headers("https://digits-1-uc.a.run.app")() == {"authorization": "Bearer token"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "d" * 50}, "service_id"),
        ({"endpoint": "d" * 40}, "together are too long"),
        ({"labels": {"run.googleapis.com/x": "1"}}, "reserved namespace"),
    ],
)
def test_a_refused_request_is_the_users_error_with_the_services_words(
    server: FakeCloudRun, changes: dict[str, Any], message: str
) -> None:
    labels = changes.pop("labels", {})
    run = CloudRunService(PLACE, deploy_of(**changes), labels=labels, encryption_key="")
    with pytest.raises(ConfigError, match=message), run.canary(MODEL, "run-1"):
        pass
    assert server.services == {}
