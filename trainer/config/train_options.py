"""Values and nested sections of the run file's `train` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from vlmpipe.trainer.config.base import Positive, Section
from vlmpipe.trainer.secret_manager import SECRET_NAME

Precision = Literal["fp32", "bf16", "bf16-autocast", "fp16"]
ComputeType = Literal["fp32", "bf16", "fp16"]
StateType = Literal["fp32", "bf16"]
Compression = Literal["none", "bf16", "fp16"]
Checkpointing = Literal["none", "selective", "full"]
CompileBackend = Literal["inductor", "aot_eager"]
Float8 = Literal["none", "tensorwise", "rowwise"]
BestMetric = Literal["validation_loss", "validation_exact_match"]
ReshardAfterForward = Literal["auto", "always", "never"]


class EarlyStoppingConfig(Section):
    """The end of a training whose validations get no better. The learning rate is still that of all steps."""

    patience: Positive = Field(3, description="Validations in a row without an improvement after which training ends.")
    min_improvement: float = Field(
        0.0,
        ge=0,
        description="By more than this train.best_metric must be better than at the last improvement to be one.",
    )


class ProfileConfig(Section):
    """Steps that are profiled with torch.profiler, which makes them slower."""

    start_step: Positive = Field(
        10,
        description="First profiled step; the first steps of a run are not typical. Raise it where later steps are "
        "slower.",
    )
    steps: int = Field(3, gt=0, le=50, description="Number of profiled steps; each takes some megabytes of trace.")
    ranks: tuple[NonNegativeInt, ...] = Field((0,), min_length=1, max_length=16, description="Profiled ranks.")

    @property
    def last_step(self) -> int:
        """Last profiled step."""
        return self.start_step + self.steps - 1


class WandbConfig(Section):
    """Metrics on Weights & Biases. Its own variables, such as WANDB_MODE and WANDB_BASE_URL, apply."""

    project: str = Field("", description="Project that also gets the metrics; empty sends none.")
    entity: str = Field(
        "", description="Team or user of the project; empty is that of the API key. Set it for the project of a team."
    )
    api_key_secret: str = Field(
        "",
        pattern=rf"^({SECRET_NAME})?$",
        description="Secret Manager secret with the API key, projects/PROJECT/secrets/NAME; empty uses an existing "
        "login.",
    )


class MlflowConfig(Section):
    """Metrics in MLflow. Its own variables, such as MLFLOW_TRACKING_TOKEN, apply; `secrets` sets them."""

    tracking_uri: str = Field(
        "",
        description="Tracking server or store, such as https://mlflow.example.com or sqlite:///mlflow.db; empty "
        "sends none. Set it to compare runs in MLflow.",
    )
    experiment: str = Field("", description="Experiment of the run; empty takes the run file's name.")
