"""Fields that Vertex AI and Kubeflow need in a run file, and settings without effect on Kubeflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from vlmpipe.config import service_forms as forms
from vlmpipe.config.service_forms import Form
from vlmpipe.config.validation_errors import Problem, RunFileError, show
from vlmpipe.trainer.config.data import BIGQUERY
from vlmpipe.trainer.config.external_trainer import WITH_ROLES

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

REGISTRY = Form(r"|(gs|vertex)://.*", "gs:// or vertex://MODEL_ID: no step sees a folder here")
VERTEX: Mapping[str, Form] = {
    "gcp.project": forms.PROJECT,
    "gcp.service_account": forms.SERVICE_ACCOUNT,
    "gcp.pipeline_image": forms.IMAGE,
    "cluster.image_uri": forms.IMAGE,
    "gcp.pipeline_root": forms.BUCKET_PREFIX,
    "register.registry": REGISTRY,
}
KUBEFLOW: Mapping[str, Form] = {"gcp.pipeline_image": forms.PULLABLE_IMAGE, "cluster.image_uri": forms.PULLABLE_IMAGE}
REACHED = "gs://bucket/folder, s3://bucket/folder or a folder on one of kubeflow.volumes"
NAMED_TEMPLATES = ("", "native", "vlmpipe")
# Fields of Vertex AI without effect on Kubeflow, and what applies there instead.
NOT_ON_KUBEFLOW = {
    "cluster.max_wait_duration": "pods wait for nodes until cluster.timeout",
    "cluster.disable_retries": "the runtime's failurePolicy decides",
    "cluster.reservation_affinity": "the cluster's node pools use reservations",
    "cluster.nfs_mounts": "the runtime's pod template mounts volumes",
    "cluster.lustre_mounts": "the runtime's pod template mounts volumes",
    "cluster.reduction_server": "it is a service of Vertex AI; NCCL sums gradients among the nodes",
    "cluster.restart_job_on_worker_restart": "the runtime's failurePolicy decides",
    "gcp.network": "pods are in the cluster's network",
    "gcp.reserved_ip_ranges": "pods are in the cluster's network",
    "gcp.psc_interface_config": "pods are in the cluster's network",
    "gcp.tensorboard": "TensorBoard's files are in the run's folder, under logs/",
    "gcp.enable_web_access": "kubectl exec leads into a pod",
    "gcp.enable_dashboard_access": "kubectl port-forward leads to a pod's port",
    "gcp.encryption_spec_key_name": "the cluster's disks have their own",
    "gcp.persistent_resource_id": "the cluster's nodes exist already",
    "notify.email": "notify.webhook is notified",
}


def require_vertex(config: RunConfig) -> None:
    """Raise RunFileError unless the run file has what Vertex AI needs to compile a pipeline."""
    deploys = [] if config.register_.serving else _deploys_image(config, forms.IMAGE)
    if config.deploy and not config.register_.registry.startswith("vertex://"):
        text = f"found with register.registry {show(config.register_.registry)}, expected vertex://MODEL_ID"
        deploys.append(Problem("deploy", f"{text}: an endpoint serves models of Vertex AI Model Registry"))
    problems = [*_violated(config, VERTEX), *_packages_elsewhere(config), *deploys, *_hub_token_elsewhere(config)]
    problems += _lmms_eval_image(config, forms.IMAGE)
    _raise(config, "Vertex AI", problems)


def require_kubeflow(config: RunConfig) -> None:
    """Raise RunFileError unless the run file has what Kubeflow needs, and nothing that it cannot do."""
    problems = _violated(config, KUBEFLOW)
    if not config.kubeflow.reaches(config.root_uri("kubeflow")):
        text = f"found {show(config.output.root_uri)}, expected {REACHED}: pods share no other"
        problems.append(Problem("output.root_uri", text))
    registry = config.register_.registry
    if registry and not config.kubeflow.reaches(registry):
        text = f"found {show(registry)}, expected {REACHED}: Vertex AI Model Registry is not there"
        problems.append(Problem("register.registry", text))
    for name in sorted(set(config.kubeflow.secret_env) & {*config.cluster.env, *config.kubeflow.env}):
        problems.append(Problem(f"kubeflow.secret_env.{name}", "is set by another field as well; expected one of them"))
    problems += [*_deploys_image(config, forms.PULLABLE_IMAGE), *_hub_token_elsewhere(config)]
    problems += _lmms_eval_image(config, forms.PULLABLE_IMAGE)
    if trainer := config.train.trainer:
        if trainer.kind == "package":
            text = "found package, expected command: a TrainJob runs an image and installs no packages"
            problems.append(Problem("train.trainer.kind", text))
        if trainer.launch in WITH_ROLES:
            text = f"found {trainer.launch}, expected another launch: a TrainJob has one kind of node and no roles"
            problems.append(Problem("train.trainer.launch", text))
    _raise(config, "Kubeflow", problems)


def _deploys_image(config: RunConfig, form: Form) -> list[Problem]:
    """The image that serves, if there is a section deploy."""
    if config.deploy is None or form.fits(config.deploy.image_uri):
        return []
    return [Problem("deploy.image_uri", f"found {show(config.deploy.image_uri)}, expected {form.expected}")]


def _lmms_eval_image(config: RunConfig, form: Form) -> list[Problem]:
    """The image of the job benchmark, if there is one."""
    lmms_eval = config.evaluate.lmms_eval
    if lmms_eval is None or form.fits(lmms_eval.image_uri):
        return []
    return [Problem("evaluate.lmms_eval.image_uri", f"found {show(lmms_eval.image_uri)}, expected {form.expected}")]


def _hub_token_elsewhere(config: RunConfig) -> list[Problem]:
    """The token of an upload to the hub: a step elsewhere has nothing of this machine's environment."""
    if config.register_.hub is None or config.register_.hub.token_secret:
        return []
    text = "missing; expected projects/PROJECT/secrets/NAME, of a token that may write"
    return [Problem("register.hub.token_secret", text)]


def _packages_elsewhere(config: RunConfig) -> list[Problem]:
    """Packages that Vertex AI could not read."""
    trainer = config.train.trainer
    here = [uri for uri in trainer.package_uris if not uri.startswith("gs://")] if trainer else []
    text = f"found {show(here[0])}, expected gs:// paths: `vlmpipe submit` builds and uploads them" if here else ""
    return [Problem("train.trainer.package_uris", text)] if here else []


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The fields that name files which a job reads, with their values."""
    yield from config.data.addresses().items()
    if config.data.chat_template not in NAMED_TEMPLATES:
        yield "data.chat_template", config.data.chat_template
    if config.evaluate.lmms_eval:
        yield "evaluate.lmms_eval.include_path", config.evaluate.lmms_eval.include_path
    for number, benchmark in enumerate(config.evaluate.benchmarks):
        for field in ("uri", "annotations", "images"):
            yield f"evaluate.benchmarks.{number}.{field}", getattr(benchmark, field)


def require_reached_files(config: RunConfig, target: Literal["vertex", "kubeflow"]) -> None:
    """Raise RunFileError unless jobs on the target can read the run's files. A pipeline can be compiled without."""
    is_vertex = target == "vertex"
    expected = "a gs:// path" if is_vertex else REACHED
    problems = [
        Problem(field, f"found {show(uri)}, expected {expected}: a job does not see this machine's files")
        for field, uri in _files(config)
        if uri
        and not uri.startswith(("builtin:", BIGQUERY))
        and not (uri.startswith("gs://") if is_vertex else config.kubeflow.reaches(uri))
    ]
    _raise(config, "Vertex AI" if is_vertex else "Kubeflow", problems)


def unused_on_kubeflow(config: RunConfig) -> list[Problem]:
    """Settings that have no effect on Kubeflow, each with what applies instead."""
    found = []
    if config.cluster.strategies != ("standard",):
        named = ", ".join(config.cluster.strategies)
        path = "cluster.capacity_fallback" if config.cluster.capacity_fallback else "cluster.scheduling_strategy"
        text = f"{named}: has no effect on Kubeflow: kubeflow.node_selector says which nodes to take"
        found.append(Problem(path, text))
    for path, instead in NOT_ON_KUBEFLOW.items():
        section, _, field = path.partition(".")
        content = getattr(config, section)
        if getattr(content, field) and field in content.model_fields_set:
            found.append(Problem(path, f"has no effect on Kubeflow: {instead}"))
    return found


def _violated(config: RunConfig, of_fields: Mapping[str, Form]) -> list[Problem]:
    problems, content = [], config.to_dict()
    for path, form in of_fields.items():
        section, _, field = path.partition(".")
        value = content[section][field]
        if not form.fits(value):
            problems.append(
                Problem(path, f"{f'found {show(value)}' if value else 'missing'}, expected {form.expected}")
            )
    return problems


def _raise(config: RunConfig, place: str, problems: list[Problem]) -> None:
    if problems:
        raise RunFileError(f"run file {config.name}, for {place}", problems)
