"""InferenceServices of the Kubernetes fake, as KServe keeps them in its Knative mode.

Its custom resource embeds Kubernetes' own pod specification, so the rules of ports, quantities, names and volumes are
Kubernetes'. Names and replicas are checked by KServe's webhook (pkg/apis/serving/v1beta1). Fields are those of
serving.kserve.io/v1beta1 that vlmpipe may use; others are refused as unknown by strict decoding.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from tests.fakes.kubernetes import pod_rules

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
GROUP, VERSION, PLURAL = "serving.kserve.io", "v1beta1", "inferenceservices"
PREDICTOR = {"minReplicas", "maxReplicas", "canaryTrafficPercent", "containers", "serviceAccountName", "nodeSelector",
             "tolerations", "volumes"}  # fmt: skip
CONTAINER = {"name", "image", "args", "env", "ports", "readinessProbe", "resources", "volumeMounts"}
SYSTEMS = {"uid", "creationTimestamp", "managedFields", "finalizers"}  # what the system and KServe put there
METADATA = {"name", "namespace", "annotations", "labels", "resourceVersion", "generation"} | SYSTEMS
PROTOCOLS, BLOCKED = {"TCP", "UDP", "SCTP"}, {"PYTHONPATH"}
MODE, KNATIVE = "serving.kserve.io/deploymentMode", ("Knative", "Serverless")
Json = dict[str, Any]


class InferenceServices:
    """State in memory. A revision is ready when it is looked at for the second time.

    Attributes:
        urls: address of the server of a model, by its STORAGE_URI; one without never gets ready.
    """

    def __init__(self) -> None:
        self.services: dict[str, Json] = {}
        self.urls: dict[str, str] = {}
        self._revisions: dict[str, list[Json]] = {}  # predictors, oldest first
        self._looks: dict[str, int] = {}

    def problems(self, body: Json) -> list[str]:
        """Unknown fields, and values that KServe's webhook refuses."""
        unknown = [f"metadata.{one}" for one in body["metadata"].keys() - METADATA]
        unknown += [f"{one}" for one in body.keys() - {"apiVersion", "kind", "metadata", "spec"}]
        unknown += [f"spec.{one}" for one in body["spec"].keys() - {"predictor"}]
        predictor = body["spec"]["predictor"]
        unknown += [f"spec.predictor.{one}" for one in predictor.keys() - PREDICTOR]
        for one in predictor.get("containers", ()):
            unknown += [f"spec.predictor.containers.{field}" for field in one.keys() - CONTAINER]
        return [f'unknown field "{one}"' for one in sorted(unknown)]

    def violations(self, body: Json) -> list[str]:
        """Values that the types of the custom resource refuse."""
        found = []
        predictor = body["spec"]["predictor"]
        for name in ("minReplicas", "maxReplicas", "canaryTrafficPercent"):
            if not isinstance(predictor.get(name, 0), int):
                found.append(f"spec.predictor.{name}: must be of type integer")
        for container in predictor.get("containers", ()):
            for port in container.get("ports", ()):
                if not isinstance(port.get("containerPort"), int) or not 0 < port["containerPort"] < 65536:
                    found.append("containerPort: must be between 1 and 65535")
                if port.get("protocol", "TCP") not in PROTOCOLS:
                    found.append(f"protocol: Unsupported value: {port['protocol']!r}")
            found += pod_rules.quantities_that_are_none(container.get("resources", {}))
        found += pod_rules.annotations_that_are_none(body["metadata"].get("annotations", {}))
        return [*found, *pod_rules.labels_that_are_none(body["metadata"].get("labels", {}), "metadata.labels")]

    def denials(self, body: Json) -> list[str]:
        predictor, found = body["spec"]["predictor"], list[str]()
        if not NAME.fullmatch(body["metadata"].get("name", "")):
            found.append(f"the InferenceService {body['metadata'].get('name')!r} is invalid: a DNS label in lower case")
        if not 0 <= predictor.get("canaryTrafficPercent", 100) <= 100:
            found.append("canaryTrafficPercent: not from 0 to 100")
        if not 0 <= predictor["minReplicas"] <= predictor["maxReplicas"]:
            found.append("MinReplicas cannot be greater than MaxReplicas")
        if [one["name"] for one in predictor["containers"]] != ["kserve-container"]:
            found.append("a custom predictor has one container, kserve-container")
        found += pod_rules.pod_violations(predictor)
        for container in predictor["containers"]:
            probed = container.get("readinessProbe", {}).get("httpGet", {"port": 1})["port"]
            if isinstance(probed, int) and not 0 < probed < 65536:
                found.append("readinessProbe.httpGet.port: must be between 1 and 65535")
            found += pod_rules.mount_violations(container.get("volumeMounts", []), predictor.get("volumes", []))
            found += pod_rules.env_violations(container["env"])
            found += pod_rules.device_violations(container.get("resources", {}))
            found += [f"setting {name} in container is not allowed for security reasons"
                      for name in (one["name"] for one in container["env"]) if name in BLOCKED]  # fmt: skip
        if not all(isinstance(value, str) for value in body["metadata"].get("annotations", {}).values()):
            found.append("annotations: not texts")
        mode = body["metadata"].get("annotations", {}).get(MODE, KNATIVE[0])
        if mode not in KNATIVE and body["metadata"].get("name") in self.services:
            found.append(f"update rejected: deploymentMode cannot be changed from {KNATIVE[0]!r} to {mode!r}")
        return found

    def create(self, body: Json) -> Json:
        name = body["metadata"]["name"]
        self.services[name] = copy.deepcopy(body)
        self.services[name]["metadata"] |= {"resourceVersion": "1", "generation": 1} | {
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-11-22T20:00:00Z",
            "managedFields": [{"manager": "manager", "operation": "Update"}],
            "finalizers": ["inferenceservice.finalizers"],
        }
        self._revise(name)
        return self.services[name]

    def replace(self, name: str, body: Json) -> Json:
        before = self.services[name]
        after = copy.deepcopy(body)
        changed = after["spec"] != before["spec"]
        after["metadata"] |= {
            "uid": before["metadata"]["uid"],
            "creationTimestamp": before["metadata"]["creationTimestamp"],
            "resourceVersion": str(int(before["metadata"]["resourceVersion"]) + 1),
            "generation": before["metadata"]["generation"] + changed,
        }
        self.services[name] = after
        self._revise(name)
        return after

    def get(self, name: str) -> Json:
        self._looks[name] += 1
        service = self.services[name]
        revisions, uri = self._revisions[name], _storage_uri(self._revisions[name][-1])
        newest, metadata = f"{name}-predictor-{len(revisions):05d}", service["metadata"]
        if self._looks[name] < 2 or uri not in self.urls:
            waiting = {"type": "PredictorReady", "status": "False", "reason": "RevisionMissing", "message": "not ready"}
            predictor: Json = {"latestCreatedRevision": newest}
            status = {"observedGeneration": metadata["generation"], "conditions": [waiting]}
            return {**service, "status": {**status, "components": {"predictor": predictor}}}
        percent = service["spec"]["predictor"].get("canaryTrafficPercent", 100)
        tagged = {"latestRevision": True, "percent": percent, "revisionName": newest}
        if metadata.get("annotations", {}).get("serving.kserve.io/enable-tag-routing") == "true":
            tagged |= {"tag": "latest", "url": self.urls[uri]}
        status = {
            "observedGeneration": metadata["generation"],
            "conditions": [{"type": "Ready", "status": "True"}],
            "url": self.urls[uri],
            "components": {
                "predictor": {
                    "latestCreatedRevision": newest, "latestReadyRevision": newest, "traffic": [tagged],
                }
            },
        }  # fmt: skip
        return {**service, "status": status}

    def delete(self, name: str) -> Json:
        del self.services[name], self._revisions[name]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _revise(self, name: str) -> None:
        """A change of anything but shares and replicas makes a revision."""
        wanted = {key: value for key, value in self.services[name]["spec"]["predictor"].items()
                  if key != "canaryTrafficPercent"}  # fmt: skip
        known = self._revisions.setdefault(name, [])
        if not known or known[-1] != wanted:
            known.append(copy.deepcopy(wanted))
            self._looks[name] = 0


def _storage_uri(predictor: Json) -> str:
    (container,) = predictor["containers"]
    return str(next(one["value"] for one in container["env"] if one["name"] == "STORAGE_URI"))
