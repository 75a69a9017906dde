"""Section `kubeflow`: what it takes, the Kubernetes API takes."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tests.fakes.kubernetes.train_job_rules import denials, pod_violations, unknown_fields, violations
from tests.support.pipelines.train_jobs import made, pools
from vlmpipe.config.sections import kubeflow
from vlmpipe.config.sections.kubeflow import KubeflowConfig


def accepted(kind: Any) -> st.SearchStrategy[str]:
    """Texts that a type of the section takes, those at its limits of length among them."""
    pattern = next(one.pattern for field in get_args(kind)[1:] for one in field.metadata if hasattr(one, "pattern"))
    adapter: TypeAdapter[str] = TypeAdapter(kind)

    def takes(text: str) -> bool:
        try:
            return bool(text) and adapter.validate_python(text) == text
        except ValidationError:
            return False

    return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True).filter(takes)


names, keys, values = accepted(kubeflow.Name), accepted(kubeflow.LabelKey), accepted(kubeflow.LabelValue)
SECTIONS = st.fixed_dictionaries(
    {
        "service_account": names,
        "queue": accepted(kubeflow.QueueName),
        "node_selector": st.dictionaries(keys, values, max_size=2),
        "tolerations": st.lists(st.fixed_dictionaries({"key": keys, "value": values}), max_size=2),
        "secret_env": st.dictionaries(accepted(kubeflow.EnvName), accepted(kubeflow.SecretKey), max_size=2),
        "volumes": st.lists(st.fixed_dictionaries({"claim": names, "mount_path": st.just("/mnt/a")}), max_size=1),
    }
)


@settings(max_examples=15)
@given(SECTIONS)
def test_every_section_makes_a_job_that_kubernetes_takes(section: dict[str, Any]) -> None:
    job = made(pools(1, gpus=1), KubeflowConfig.model_validate(section))
    assert [*unknown_fields(job), *violations(job), *denials(job, {"torch-distributed"}), *pod_violations(job)] == []


LONG = "a" * 64
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "two dots": ({"service_account": "a..b"}, "service_account"),
    "a dash at a part's end": ({"runtime": "a-.b"}, "runtime"),
    "a namespace with a dot": ({"namespace": "a.b"}, "namespace"),
    "a queue that is no value of a label": ({"queue": LONG}, "queue"),
    "a key below no domain": ({"node_selector": {"a..b/c": "d"}}, "node_selector"),
    "a secret's key of dots": ({"secret_env": {"A": "s/.."}}, "secret_env"),
    "two volumes at a path": (
        {"volumes": [{"claim": name, "mount_path": path} for name, path in (("a", "/mnt/x"), ("b", "/mnt//x"))]},
        "volumes mount /mnt/x twice",
    ),
    "a volume in the place of shared memory": ({"volumes": [{"claim": "a", "mount_path": "/dev/shm"}]}, "/dev/shm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kubernetes_refuses_is_refused(name: str) -> None:
    section, said = REFUSED[name]
    with pytest.raises(ValidationError, match=said):
        KubeflowConfig.model_validate(section)
