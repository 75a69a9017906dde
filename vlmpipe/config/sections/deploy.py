"""The run file's `deploy` section: how a registered model is served."""

from __future__ import annotations

from pydantic import Field, model_validator

from vlmpipe.config.sections.cloud_run import CloudRunConfig
from vlmpipe.config.sections.cluster import Environment
from vlmpipe.config.sections.output import MAX_DEPLOYMENT_S
from vlmpipe.config.vllm import load_vllm
from vlmpipe.trainer.config.base import Agreement, Positive, Section
from vlmpipe.trainer.config.checkpoint import QuantizedFormat
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError

IDLE_MINUTES = 60
PORT, CHAT_ROUTE = 8080, "/v1/chat/completions"
# Where Vertex AI and GKE put the driver's libraries, which no loader searches by itself.
DRIVER_FOLDERS = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"}
# Images are resized by Pillow, as in training and evaluation: beside torchvision, transformers would take that. The
# newer name, `backend`, reaches processors of videos too, which have no such backend.
PILLOW = '--mm-processor-kwargs={"use_fast": false}'


class DeployConfig(Section):
    """Serving by vLLM on a Vertex AI endpoint, a Cloud Run service or a KServe InferenceService; transformers serve in
    local runs.
    """

    endpoint: str = Field(
        pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Id of the endpoint on Vertex AI, or name of the Cloud Run service or of the InferenceService; "
        "created if missing.",
    )
    cloud_run: CloudRunConfig | None = Field(
        None,
        description="Serve by a Cloud Run service with a GPU, {} for its defaults; null serves by an endpoint of "
        "Vertex AI. For runs on Vertex AI.",
    )
    image_uri: str = Field(
        "",
        description="Image of vLLM's OpenAI server by its digest, on Vertex AI in Artifact Registry; adapters and "
        "files in a bucket need that of container/serving.Dockerfile. Empty for local runs only.",
    )
    quantized: QuantizedFormat | None = Field(
        None,
        description="Quantized export that is served in place of the model, one of evaluate.quantize.formats; null "
        "serves the model. One that the evaluation has refused ends deploy-model with an error.",
    )
    args: tuple[str, ...] = Field((), description="Additional arguments of vLLM, for example --max-model-len=4096.")
    machine_type: str = Field("g2-standard-12", description="Machine of a replica. Vertex AI only.")
    accelerator_type: str = Field("NVIDIA_L4", description="GPU of a replica, as in cluster.accelerator_type.")
    accelerator_count: int = Field(1, ge=0, description="GPUs of a replica.")
    min_replicas: int = Field(
        1,
        ge=0,
        description="Minimum number of replicas; 0 lets the endpoint sleep while no question comes, and the first one "
        "afterwards waits or is refused until a replica has started. On Kubeflow 0 needs KServe in its Knative mode.",
    )
    idle_minutes: int = Field(
        IDLE_MINUTES,
        ge=5,
        le=480,
        description="With min_replicas 0, minutes without a question after which the last replica goes. Vertex AI "
        "only; on Kubeflow Knative's own settings decide.",
    )
    max_replicas: Positive = Field(1, description="Maximum number of replicas.")
    canary_percent: int = Field(
        10,
        ge=1,
        le=100,
        description="Percentage of the traffic for the new model during its test; all of it if the endpoint has no "
        "model yet.",
    )
    traffic_percent: int = Field(
        100,
        ge=1,
        le=100,
        description="Percentage of the traffic for the new model after its test; 100 undeploys the model before it.",
    )
    smoke_questions: Positive = Field(20, description="Validation questions that the test asks the served model.")
    min_agreement: Agreement = Field(
        0.95,
        description="Minimum share of answers that equal those of evaluate; below it the deployment is undone. Above "
        "0, which would accept any answers.",
    )
    env: Environment = Field(
        default_factory=dict,
        description="Environment variables of the container. LD_LIBRARY_PATH, in place of the image's own, names the "
        "folders of the GPU's driver unless it is set here; vlmpipe doctor names folders that are lost. No secrets.",
    )
    shared_memory_size_mb: Positive = Field(
        16384, description="Size of /dev/shm, in MB of the machine's memory; vLLM on several GPUs needs it."
    )
    deployment_timeout_s: int = Field(
        7200,
        gt=0,
        le=MAX_DEPLOYMENT_S,
        description="Seconds within which the model must be served; at most 7200 on Vertex AI. Lower it to end a "
        "deployment that hangs sooner.",
    )

    @model_validator(mode="after")
    def _replicas_fit(self) -> DeployConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        if (
            self.min_replicas and self.idle_minutes != IDLE_MINUTES
        ):  # the default is written out with the whole run file
            raise ValueError(f"idle_minutes is set with min_replicas {self.min_replicas}, whose replicas never go")
        return self

    @property
    def sleeps(self) -> bool:
        """Return whether no replica is left while no question comes."""
        return self.min_replicas == 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the container."""
        return {**DRIVER_FOLDERS, **self.env}

    def arguments(self, name: str, model: ModelConfig, precision: str, folder: str = "{model_uri}") -> list[str]:
        """Arguments of `vllm serve`, for a model called `name` with its files in `folder`.

        For an adapter these are the arguments of `vlmpipe.trainer.serving.vllm_server`, the program of our image: its
        --settings is none of vLLM's, so that another image ends with an error in place of other answers.

        Raises ConfigError for an adapter whose base the container could not load, or whose rank vLLM does not take.
        """
        dtype = "bfloat16" if precision == "bf16" else "float32"
        args = [
            "--host=0.0.0.0",
            f"--port={PORT}",
            f"--dtype={dtype}",
            f"--tensor-parallel-size={self.tensor_parallel}",
            PILLOW,
        ]
        if not model.exports_adapter:
            return [folder, *args, f"--served-model-name={name}", *self.args]
        assert model.lora and model.pretrained
        vllm = load_vllm()
        rank = vllm.max_lora_rank(model.lora.rank)
        if rank is None:
            raise ConfigError(
                f"model.lora.rank {model.lora.rank} is more than {vllm.name} serves, {vllm.lora_ranks[-1]}",
                expected="a smaller rank, or model.lora.export: merged",
            )
        base, revision = _loadable_base(model), model.pretrained.revision
        pinned = [f"--revision={revision}"] if revision else []
        adapter = ["--enable-lora", f"--max-lora-rank={rank}", f"--lora-modules={name}={folder}"]
        if set(model.lora.parts) != {"language_model"}:
            adapter.append("--enable-tower-connector-lora")
        return [base, *args, *pinned, *adapter, f"--settings={folder}", *self.args]

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share the model; 1 where a replica has none."""
        return max(1, self.accelerator_count)


def _loadable_base(model: ModelConfig) -> str:
    base = model.pretrained.weights if model.pretrained else ""
    if not base or base.startswith(("/", ".", "run:", "~", "file:")):
        raise ConfigError(
            f"the adapter's base is {base or 'missing'}, which no server can load",
            expected="model.pretrained.weights on the hub, or under gs:// or s3://, where the container finds it",
            fix="publish the base, or export the adapter merged (model.lora.export: merged)",
        )
    return base
