"""Examples that each command's help ends with."""

from __future__ import annotations

import typer

# Arguments of each command, as typed after its name.
EXAMPLES = {
    "init": ("", "llava --output my-run.yaml", "--data photos --output photos.yaml"),
    "import": (
        "ds_config.json --output my-run.yaml",
        "custom_job.yaml --job-spec --output corrected.yaml",
        "--command 'torchrun --nproc_per_node=8 train.py --data gs://my-bucket/data'",
    ),
    "check": ("configs/digits.yaml", "configs/llava-local.yaml data.source=my.json", "--job-spec job.yaml"),
    "doctor": ("configs/llava-7b.yaml", "my-run.yaml gcp.location=europe-west4 --json"),
    "plan": (
        "configs/llava-7b.yaml",
        "configs/llava-7b.yaml --suggest under:400",
        "configs/llava-7b-hsdp.yaml --strategies",
    ),
    "gate": ("configs/digits.yaml", "configs/llava-7b.yaml gate.max_regression=0.01 --questions 5000 --json"),
    "run": (
        "configs/digits.yaml",
        "configs/llava-local.yaml data.source=my.json data.image_folder=images --run-id mine",
        "configs/digits.yaml --inject-fault kill:rank=0,after_step=7",
    ),
    "compile": ("configs/*.yaml", "configs/llava-7b.yaml train.epochs=2 --target kubeflow --output build/kubeflow"),
    "publish": ("configs/llava-7b.yaml --registry https://us-central1-kfp.pkg.dev/my-project/pipelines --tag stable",
                "configs/llava-7b.yaml configs/qwen2-5-vl-7b.yaml --json"),
    "submit": (
        "configs/llava-7b.yaml --dry-run",
        "https://us-central1-kfp.pkg.dev/my-project/pipelines/digits/stable --yes",
        "--job-spec job.yaml --project my-project --location us-central1",
    ),
    "rehearse": ("configs/llava-7b.yaml", "my-run.yaml gcp.project=my-project"),
    "curve": (
        "configs/digits.yaml",
        "my-run.yaml --shares 10,30,100 --seeds 1 --goal 0.9",
        "my-run.yaml --target vertex --dry-run",
    ),
    "tune": (
        "my-run.yaml --from digits-20260301-120000",
        "my-run.yaml --from digits-20260301-120000 --target vertex --dry-run",
    ),
    "docs": ("", "tutorial", "bring-your-own-data"),
    "prove": ("", "configs/digits.yaml train.strategy=fsdp --output build/prove", "my-run.yaml --law resume --json"),
    "status": ("", "digits-20260301-120000 --watch", "digits-20260301-120000 --deep"),
    "runs list": ("", "--name digits --outcome done --json", "--tag baseline"),
    "runs tag": ("@last baseline", "digits-20260301-120000 baseline --remove"),
    "runs rm": ("digits-20260301-120000 --dry-run", "@last:digits --unfinished --yes"),
    "runs prune": ("--dry-run", "--keep 5 --older-than-days 30 --yes", "--name digits --keep 1 --unfinished"),
    "runs page": ("", "--output build/runs.html"),
    "cancel": ("digits-20260301-120000", "runs/runs/digits-20260301-120000 --json"),
    "logs": (
        "digits-20260301-120000 --step train --follow",
        "digits-20260301-120000 --last 0 --json",
    ),
    "diagnose": ("digits-20260301-120000", "digits-20260301-120000 --project my-project --location us-central1"),
    "compare": (
        "digits-20260301-120000 digits-20260302-120000",
        "digits@champion digits-20260302-120000 --html build/compare.html",
        "digits@3 digits@4 --predictions build/answers.parquet --json",
    ),
    "ask": ("@last photo.jpg 'what digit is this?'", "digits@champion photo.jpg"),
    "chat": ("@last photo.jpg", "digits@champion photo.jpg --root runs"),
    "predict": (
        "@last photo.jpg --question 'what digit is this?'",
        "digits-20260301-120000 my-images --question 'what digit is this?' --output build/answers.jsonl",
        "digits@champion questions.csv --output build/answers.parquet --json",
    ),
    "serve": ("digits-20260301-120000", "digits-20260301-120000 --check 100", "digits@champion --check 20 --url "
              "http://localhost:8000/v1/chat/completions --model digits"),
    "mcp": (
        "--root my-runs",
        "--root my-runs --max-usd-per-call 20 --max-usd 50 --address gs://my-bucket --allow cancel",
        "--root my-runs --max-usd-per-call 20 --max-usd 200 --ledger spent.jsonl",
    ),
    "skill": ("", "--output .agents/skills --json"),
    "schema": ("--markdown", "--output docs/reference"),
    "cache explain": ("configs/digits.yaml", "configs/digits.yaml model.image_size=128 --json"),
    "data fetch": ("lmms-lab/DocVQA --subset DocVQA --output docvqa", "my-team/receipts --revision v2 --json"),
    "data inspect": ("configs/digits.yaml", "my-run.yaml --first 100 --count 10 --json"),
    "data audit": ("@last", "configs/digits.yaml --output audit-digits"),
    "data convert": ("gs://my-bucket/runs/prepared/5ca5d44d27be765e0a53e2cedbf35b83",
                     "runs/prepared/5ca5d44d27be765e0a53e2cedbf35b83 --json"),
    "data export": ("digits-20260301-120000 --format llama-factory --output build/digits",
                    "configs/digits.yaml --format messages --output build/digits --json"),
    "schedule plan": ("my-run.yaml", "my-run.yaml 'schedule.cron=0 6 * * 1' --json"),
    "schedule apply": ("my-run.yaml --yes", "my-run.yaml --target kubeflow"),
    "schedule list": ("my-run.yaml", "my-run.yaml --json"),
    "schedule pause": ("my-run.yaml", "my-run.yaml --json"),
    "schedule resume": ("my-run.yaml", "my-run.yaml --catch-up"),
    "schedule delete": ("my-run.yaml", "my-run.yaml --json"),
}  # fmt: skip


def add_examples(app: typer.Typer, group: str = "") -> None:
    """End the help of every command with its examples."""
    for command in app.registered_commands:
        assert command.callback
        name = f"{group}{command.name or command.callback.__name__}"
        lines = [f"  vlmpipe {name} {arguments}".rstrip() for arguments in EXAMPLES[name]]
        command.epilog = "\n".join(["\b", "Examples:", *lines])
    for child in app.registered_groups:
        assert child.typer_instance
        add_examples(child.typer_instance, f"{group}{child.name} ")
