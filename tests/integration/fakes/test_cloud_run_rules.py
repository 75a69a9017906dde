"""The local server of Cloud Run refuses each rule that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.cloud.run_v2 import types as api

from tests.fakes.cloud_run.rules import problems
from tests.fakes.cloud_run.server import FakeCloudRun
from tests.support.vertex.cloud_run import RTX, cloud_run, deployed, made, service_of

Change = Callable[[api.Service], object]
MUTATIONS: list[tuple[str, Change]] = [
    ("needs at least 4 vCPUs", lambda s: s.template.containers[0].resources.limits.update(cpu="2", memory="8Gi")),
    ("needs at least 4 vCPUs and 16Gi", lambda s: s.template.containers[0].resources.limits.update(memory="8Gi")),
    ("is more than 4 vCPUs may have", lambda s: s.template.containers[0].resources.limits.update(cpu="4")),
    ("cpu 6 is not supported", lambda s: s.template.containers[0].resources.limits.update(cpu="6")),
    ("of which only 1", lambda s: s.template.containers[0].resources.limits.update({"nvidia.com/gpu": "2"})),
    ("are not supported", lambda s: s.template.containers[0].resources.limits.update({"ephemeral-storage": "1Gi"})),
    ("CPU always allocated", lambda s: setattr(s.template.containers[0].resources, "cpu_idle", True)),
    ("go together", lambda s: setattr(s.template.node_selector, "accelerator", "")),
    ("is no GPU of Cloud Run", lambda s: setattr(s.template.node_selector, "accelerator", "nvidia-tesla-t4")),
    ("needs at least 20 vCPUs", lambda s: setattr(s.template.node_selector, "accelerator", "nvidia-rtx-pro-6000")),
    ("second generation", lambda s: setattr(s.template, "execution_environment", 1)),
    ("is not allowed", lambda s: setattr(s.template.containers[0].volume_mounts[0], "mount_path", "/dev/shm")),
    ("is no path", lambda s: setattr(s.template.containers[0].volume_mounts[0], "mount_path", "/a:b")),
    ("is no volume", lambda s: setattr(s.template.containers[0].volume_mounts[0], "name", "other")),
    ("leading --", lambda s: setattr(s.template.volumes[0].gcs, "mount_options", ["--implicit-dirs"])),
    ("is no bucket", lambda s: setattr(s.template.volumes[0].gcs, "bucket", "gs://registry")),
    ("has 0 types", lambda s: setattr(s.template, "volumes", [api.Volume(name="bucket-0")])),
    ("at most 1800 s", lambda s: setattr(s.template.containers[0].startup_probe, "failure_threshold", 181)),
    ("from 1 to 240", lambda s: setattr(s.template.containers[0].startup_probe, "period_seconds", 241)),
    ("not more than period_seconds", lambda s: setattr(s.template.containers[0].startup_probe, "timeout_seconds", 11)),
    ("from 0 to 240", lambda s: setattr(s.template.containers[0].startup_probe, "initial_delay_seconds", 241)),
    ("exactly one of", lambda s: setattr(s.template.containers[0].startup_probe, "http_get", None)),
    ("is reserved", lambda s: s.template.containers[0].env.append(api.EnvVar(name="PORT", value="1"))),
    ("a name twice", lambda s: s.template.containers[0].env.append(s.template.containers[0].env[0])),
    ("is no TCP port", lambda s: setattr(s.template.containers[0].ports[0], "container_port", 65536)),
    ("only a single port", lambda s: s.template.containers[0].ports.append(api.ContainerPort(container_port=1))),
    ("neither http1 nor h2c", lambda s: setattr(s.template.containers[0].ports[0], "name", "http2")),
    ("at most 1000", lambda s: setattr(s.template, "max_instance_request_concurrency", 1001)),
    ("more than max_instance_count", lambda s: setattr(s.scaling, "min_instance_count", 2)),
    ("single container", lambda s: setattr(s.template, "containers", [])),
    ("image: required", lambda s: setattr(s.template.containers[0], "image", "")),
    ("no e-mail address", lambda s: setattr(s.template, "service_account", "jobs")),
    ("reserved namespace", lambda s: s.template.annotations.update({"run.googleapis.com/x": "1"})),
    ("is private", lambda s: setattr(s, "invoker_iam_disabled", True)),
]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudRun]:
    with cloud_run(monkeypatch) as running:
        yield running


def test_our_service_keeps_every_rule_in_every_size() -> None:
    for changes in ({}, {"cloud_run": {"cpu": 4}}, RTX, {"cloud_run": {"memory_gib": 24}}):
        assert list(problems(made(**changes), "us-central1")) == []


@pytest.mark.parametrize(("message", "change"), MUTATIONS, ids=[f"{text}-{n}" for n, (text, _) in enumerate(MUTATIONS)])
def test_the_server_refuses_each_broken_rule(message: str, change: Change) -> None:
    wanted = made()
    change(wanted)
    assert any(message in problem for problem in problems(wanted, "us-central1"))


def test_a_region_without_the_gpu_is_refused() -> None:
    assert list(problems(made(), "us-west1")) == ["node_selector.accelerator: nvidia-l4 is not in us-west1"]
    assert list(problems(made(**RTX), "us-east4"))


def test_traffic_and_revisions_are_checked_by_the_server(server: FakeCloudRun) -> None:
    deployed("run-1")
    run, revision = service_of(), server.made[0]
    for traffic, message in (
        ([api.TrafficTarget(type_=2, revision=revision, percent=99)], "add up to 100"),
        ([api.TrafficTarget(type_=2, revision="digits-none", percent=100)], "there is no revision"),
        ([api.TrafficTarget(type_=1, revision=revision, percent=100)], "either the latest"),
        ([api.TrafficTarget(type_=1, percent=share, tag="a") for share in (40, 60)], "a tag twice"),
    ):
        with pytest.raises(Exception, match=message):
            run._update(api.Service(traffic=traffic), "traffic")
    changed = api.RevisionTemplate(server.services["digits"].service.template)
    changed.max_instance_request_concurrency = 1
    with pytest.raises(Exception, match="different configuration"):
        run._update(api.Service(template=changed), "template")
