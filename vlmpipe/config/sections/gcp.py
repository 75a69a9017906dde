"""The run file's `gcp` section: the Google Cloud project."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from vlmpipe.config import service_forms as forms
from vlmpipe.config.sections.labels import MAX_LABELS, LabelKey, LabelValue
from vlmpipe.config.validation_errors import Problem, ProblemsError
from vlmpipe.trainer.config.base import Section, StorageUri

Region = Annotated[str, AfterValidator(forms.REGION.required)]


class DnsPeeringConfig(Section):
    """A private DNS zone that the jobs can resolve."""

    domain: str = Field(
        min_length=1, description="DNS suffix of the zone, which ends with a dot, such as corp.internal."
    )
    target_project: str = Field(min_length=1, description="Project that hosts the zone; grant roles/dns.peer there.")
    target_network: str = Field(
        min_length=1, description="Name of the VPC network in target_project in which the zone is visible."
    )


class PscInterfaceConfig(Section):
    """Private Service Connect interface of the jobs."""

    network_attachment: str = Field(min_length=1, description="Network attachment, by name or full resource name.")
    dns_peering_configs: tuple[DnsPeeringConfig, ...] = Field(
        (), description="Private DNS zones that the jobs can resolve."
    )


class GcpConfig(Section):
    """The Google Cloud project in which the pipeline runs. On Kubeflow only pipeline_image and pipeline_root count."""

    project: str = Field("", description="Project id.")
    location: Annotated[Region, Field(min_length=1)] = Field("us-central1", description="Region of pipeline and jobs.")
    pipeline_image: str = Field("", description="Image of the pipeline's CPU steps, best by digest.")
    service_account: str = Field("", description="E-mail of the service account that the pipeline's steps run as.")
    job_service_account: str = Field(
        "",
        pattern=r"^([a-z0-9-]+@[a-z0-9.:-]+\.gserviceaccount\.com)?$",
        description="E-mail of the service account that the jobs run as, which needs no right to start anything; "
        "empty takes service_account.",
    )
    pipeline_root: StorageUri = Field("", description="gs:// prefix for the pipeline's own artifacts.")
    network: str = Field("", description="VPC network to peer with: projects/<number>/global/networks/<name>.")
    reserved_ip_ranges: tuple[str, ...] = Field(
        (), description="Names of reserved IP ranges of network to use for the jobs; empty for any."
    )
    psc_interface_config: PscInterfaceConfig | None = Field(
        None, description="Private Service Connect interface, instead of network."
    )
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        max_length=MAX_LABELS,
        description="Labels of pipeline, jobs, model and endpoint; vlmpipe and Vertex AI add their own. At most 63 of "
        "a to z, digits, dashes and underscores, with a letter or digit at both ends and a letter first in a name.",
    )
    tensorboard: Annotated[str, AfterValidator(forms.TENSORBOARD.required)] = Field(
        "", description="Vertex AI TensorBoard instance in location, full resource name."
    )
    experiment: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9-]{3,59})?$",
        description="Vertex AI experiment in which each run logs its settings and final metrics; empty for none.",
    )
    encryption_spec_key_name: Annotated[str, AfterValidator(forms.ENCRYPTION_KEY.required)] = Field(
        "", description="Customer-managed encryption key in location, full resource name."
    )
    persistent_resource_id: str = Field(
        "", description="Persistent resource in location to run the jobs on, by its id; it must have their machines."
    )
    enable_web_access: bool = Field(
        False, description="Allow an interactive shell into running jobs; vlmpipe status prints its address."
    )
    enable_dashboard_access: bool = Field(
        False, description="Allow access to a dashboard that the chief serves; vlmpipe status prints its address."
    )

    @model_validator(mode="after")
    def _one_network(self) -> GcpConfig:
        if self.network and self.psc_interface_config:
            raise ValueError("give network or psc_interface_config, not both: a job has one of them")
        return self

    @model_validator(mode="after")
    def _one_region(self) -> GcpConfig:
        for field, form in (("tensorboard", forms.TENSORBOARD), ("encryption_spec_key_name", forms.ENCRYPTION_KEY)):
            region = form.region_of(getattr(self, field))
            if region and region != self.location:
                raise ProblemsError(
                    [Problem(f"gcp.{field}", f"is in {region}, expected one in gcp.location, {self.location}")]
                )
        return self
