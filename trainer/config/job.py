"""The part of the run file that the container needs: model, data, features, train and evaluate.

Every field says its effect and unit in one line. `vlmpipe.config.run_config.RunConfig` adds the sections that only
the pipeline reads. `JobConfig` is what a job loads from `run.json`, the effective run file that `resolve_run` wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from vlmpipe.trainer.config.base import Positive, Section
from vlmpipe.trainer.config.benchmarks import BenchmarkConfig, RetentionConfig
from vlmpipe.trainer.config.checkpoint import CheckpointConfig, QuantizeConfig
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.lmms_eval import LmmsEvalConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.strategies import DEFERRING
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_options import StateType
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.record import of_another_version
from vlmpipe.trainer.secret_manager import use_hub_token
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.records import RUN_FILE, read_record

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Fields that are gone (docs/decisions/0148), with the values by which they did nothing: records of earlier runs hold
# every field. Those of powersgd counted with gradient_compression: powersgd only, which is refused by itself.
ANY_VALUE = object()
GONE: dict[str, dict[str, object]] = {
    "train": {
        "overlap_vision_encoder": False,
        "zero_hpz": False,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "nvme_path": "",
        "powersgd": ANY_VALUE,
        "freeze_gc": ANY_VALUE,  # it and those below changed no result
    },
    "checkpoint": {"keep_best": ANY_VALUE, "mirror_lag_warning_s": ANY_VALUE},
    "cluster": {"local_port": ANY_VALUE},
    "plan": {"disk_gbytes_per_s": ANY_VALUE},  # of the disk under train.nvme_path
}
# Under the root of all runs.
PREPARED_FOLDER, CHUNKS_FOLDER, BASELINES_FOLDER = "prepared", "chunks", "baselines"


SECRET_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
SECRET_VERSION = r"projects/[^/]+/secrets/[^/]+/versions/[^/]+"
# Read by the launcher, Python or the linker before a secret is there, or set by Vertex AI.
_NOT_FOR_SECRETS = re.compile(
    r"PATH|HOME|LD_\w+|PYTHON\w*|CLUSTER_SPEC|TF_CONFIG|(AIP|CLOUD_ML|VLMPIPE)_\w+|RANK|WORLD_SIZE|MASTER_(ADDR|PORT)"
)


def _secrets(environment: dict[str, str]) -> dict[str, str]:
    for variable, name in environment.items():
        if not re.fullmatch(SECRET_VARIABLE, variable):
            raise ValueError(f"{variable!r} is not a name of an environment variable")
        if _NOT_FOR_SECRETS.fullmatch(variable):
            raise ValueError(f"{variable} is a variable of the platform or of Python; expected another one")
        if not re.fullmatch(SECRET_VERSION, name):  # not repeated: it may be the secret itself
            raise ValueError(f"{variable}: expected projects/PROJECT/secrets/NAME/versions/VERSION in Secret Manager")
    return environment


Secrets = Annotated[dict[str, str], AfterValidator(_secrets)]


class FeaturesConfig(Section):
    """Caching of the frozen vision encoder's output."""

    cache: Literal["on", "off", "auto"] = Field(
        "auto",
        description="Encode each image once before training: on, off, or auto, which does so if the plan finds that "
        "it saves time.",
    )
    shard_images: Positive = Field(512, description="Images per feature shard.")
    batch_images: Positive = Field(
        64, description="Images encoded together. Lower it where the encoder runs out of memory."
    )


AUDIT_CHUNK_TOKENS = 1024  # whose logits an audit holds at once where training computes all of a sequence's


class AuditConfig(Section):
    """Data audit of the run, a job of its own after training."""

    max_samples: int = Field(
        0, ge=0, description="Samples whose losses are computed, evenly spread over the splits; 0 is all."
    )


class EvaluateConfig(Section):
    """Evaluation on the validation split."""

    max_samples: int = Field(0, ge=0, description="Validation samples to use; 0 is all.")
    max_new_tokens: Positive = Field(16, description="Longest generated answer, in tokens.")
    batch_questions: Positive = Field(64, description="Most questions answered together.")
    batch_tokens: Positive = Field(
        32_768,
        description="Most tokens of prompts and answers in a batch, padding included; longer questions make smaller "
        "batches. Halved, with a note, if the GPU's memory does not suffice. Raise it on GPUs with memory "
        "to spare.",
    )
    earlier_turns: Literal["reference", "none"] = Field(
        "reference",
        description="Context of a later turn: reference puts the earlier ones with their reference answers before it, "
        "as in training; none asks each turn alone. Set it to none where each question is about the image "
        "alone.",
    )
    controls: tuple[Literal["shuffled_image", "no_image"], ...] = Field(
        ("shuffled_image", "no_image"),
        description="Further evaluations with another sample's image (shuffled_image) or without one (no_image), "
        "which show what the text alone gives away.",
    )
    cider_d: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Score answers as captions, by CIDEr-D; auto does if expected answers have five words or more on "
        "average. Set it to on for shorter captions.",
    )
    benchmarks: tuple[BenchmarkConfig, ...] = Field(
        (), description="Question files of published sets, scored after the validation questions; none are downloaded."
    )
    baseline: Literal["auto", "off"] = Field(
        "auto",
        description="Answers of the start weights to the same questions, for the gain and the forgetting: auto asks "
        "them once, and keeps the answers for later runs, unless the language model or the projector is drawn at "
        "random; off asks none.",
    )
    retention: RetentionConfig = Field(
        default_factory=RetentionConfig, description="Questions that show what training made the model forget."
    )
    quantize: QuantizeConfig | None = Field(
        None,
        description="Quantized exports, registered with the model if they answer as it does; null for none. With "
        "stages, of the last one alone, unless a stage asks for its own.",
    )
    lmms_eval: LmmsEvalConfig | None = Field(
        None, description="A further job, benchmark, in which lmms-eval scores the export; null for none."
    )
    audit: AuditConfig | None = Field(
        None,
        description="A further job, audit, that looks for copied images and wrong labels in the run's data and writes "
        "audit.html and exclusions.jsonl; {} audits all samples, null for none.",
    )

    @field_validator("benchmarks")
    @classmethod
    def _distinct(cls, benchmarks: tuple[BenchmarkConfig, ...]) -> tuple[BenchmarkConfig, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"found two benchmarks named {repeated}, expected names that differ")
        return benchmarks


class RunPaths(Section):
    """Where this run reads and writes. Prepared data and features are shared between runs by content."""

    run_id: str = Field(description="Name of the run, unique under root_uri.")
    root_uri: str = Field(description="Folder or prefix of a bucket that holds everything.")
    submission: str = Field(
        "",
        description="What tells one submission of the run from the next, such as the pipeline job's name. Restarts of "
        "a job and retries of a step have the same; empty: all starts of the run are of one.",
    )

    @property
    def submission_name(self) -> str:
        """The submission; where none is named, the run is the only one."""
        return self.submission or self.run_id

    @property
    def run_uri(self) -> str:
        return join_uri(self.root_uri, "runs", self.run_id)

    @property
    def prepared_root(self) -> str:
        return join_uri(self.root_uri, PREPARED_FOLDER)

    @property
    def chunks_root(self) -> str:
        return join_uri(self.root_uri, CHUNKS_FOLDER)

    @property
    def features_root(self) -> str:
        return join_uri(self.root_uri, "features")

    @property
    def baselines_root(self) -> str:
        return join_uri(self.root_uri, BASELINES_FOLDER)


class JobSections(BaseModel):
    """The sections of a run file that its jobs read, too. The schema of the run file extends it."""

    version: Literal[1] = Field(1, description="Version of this file's format.")
    name: str = Field(description="Name of the run file's runs.")
    model: ModelConfig = Field(description="The vision-language model.")
    data: DataConfig = Field(description="Where samples come from.")
    features: FeaturesConfig = Field(
        default_factory=FeaturesConfig, description="Caching of the vision encoder's output."
    )
    train: TrainConfig = Field(description="The training step.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="How checkpoints are written and retained."
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation on the validation split.")


class JobConfig(JobSections):
    """Settings of a run that its jobs read. Sections that only the pipeline reads are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: RunPaths
    secrets: Secrets = {}

    @classmethod
    def load(cls, uri: str) -> JobConfig:
        """Read the effective run file at `uri` (`<run>/run.json`), and the token for the hub that it names.

        Raises ConfigError as `of_record` does.
        """
        folder, _, name = uri.rpartition("/")
        job = cls.of_record(read_record(open_storage(folder), name), uri)
        use_hub_token(job.model.hub_token_secret)
        return job

    @classmethod
    def read(cls, store: Storage) -> JobConfig:
        """Read the run.json of the run in `store`. Raises ConfigError as `of_record` does."""
        return cls.of_record(read_record(store, RUN_FILE), store.uri(RUN_FILE))

    @classmethod
    def of_record(cls, content: Mapping[str, object], uri: str) -> JobConfig:
        """The run file with this content, which was read at `uri`.

        Raises ConfigError for one that another version of vlmpipe wrote, whose fields are not those of this one, unless
        they did nothing.
        """
        try:
            return cls.model_validate(without_gone(content))
        except ValidationError as error:
            raise of_another_version(uri, error) from error

    @property
    def export_dtype(self) -> StateType:
        """Type of the weights in the run's export."""
        return export_dtype(self.model, self.train, self.checkpoint)

    def pointers(self) -> DataPointers:
        """The prepared data and features of this run. Needs `prepare_data` to have run."""
        return DataPointers.read(open_storage(self.run.run_uri))


class _NamedSecrets(BaseModel):
    secrets: Secrets = {}


def secrets_of(store: Storage) -> dict[str, str]:
    """Return the secrets that the run in `store` names, by variable; its other settings are not checked."""
    return _NamedSecrets.model_validate(read_record(store, RUN_FILE)).secrets


def export_dtype(model: ModelConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> StateType:
    """Type of the weights in an export: what checkpoint.export_dtype says, for a whole model."""
    if model.exports_adapter:  # small, and added to a base in fp32
        return "fp32"
    if checkpoint.export_dtype != "auto":
        return checkpoint.export_dtype
    return "bf16" if train.has_bf16_weights else "fp32"


def defers_weights(model: ModelConfig, train: TrainConfig) -> bool:
    """Return whether stored weights are read layer by layer while they are sharded, so that no rank holds the model
    whole.
    """
    return train.strategy in DEFERRING and bool(model.language_model.weights) and not model.quantizes_base


def require_run_id(name: str) -> None:
    """Raise ConfigError for a run's id that cannot be a folder's name, or that would lead out of the runs' folder."""
    if not RUN_ID.fullmatch(name):
        raise ConfigError(
            f"run_id is {name!r}",
            expected="letters, digits, dots, dashes and underscores, at most 128, starting with a letter or digit",
        )


def run_uri_of(root_uri: str, run_id: str, job_name: str) -> str:
    """The run's folder. `job_name` is the pipeline job's own name, which an empty `run_id` stands for."""
    return join_uri(root_uri, "runs", run_id or job_name)


def without_gone(content: Mapping[str, object]) -> dict[str, object]:
    """A record of a run file without the fields that are gone and did nothing in it; its stages' too."""
    left = {name: _section_without(value, GONE.get(name, {})) for name, value in content.items()}
    if isinstance(stages := content.get("stages"), list):
        left["stages"] = [without_gone(stage) if isinstance(stage, Mapping) else stage for stage in stages]
    return left


def _section_without(section: object, gone: Mapping[str, object]) -> object:
    if not gone or not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if name not in gone or gone[name] not in (ANY_VALUE, value)}
