"""Fine-tune a vision-language model with ms-swift. torchrun starts it; run.yaml has its command.

Arguments behind the folders are options of `swift sft`. ms-swift leaves its model in the last checkpoint only: that is
copied to the output folder, unless training was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed
OF_TRAINING = ("optimizer*", "scheduler*", "rng_state*", "trainer_state*", "training_args*", "args.json")
HAS_GPU = torch.cuda.is_available()
OPTIONS = {
    "model_type": "qwen2_5_vl",
    "template": "qwen2_5_vl",
    "tuner_type": "full",
    "freeze_vit": "false",
    "freeze_aligner": "false",
    "attn_impl": "sdpa",
    "gradient_checkpointing": str(HAS_GPU).lower(),
    "torch_dtype": "bfloat16" if HAS_GPU else "float32",
    "use_cpu": str(not HAS_GPU).lower(),  # without it processes on CPUs train a model each
    "add_version": "false",  # else each start has a folder of its own
    "enable_jit_checkpoint": "true",  # SIGTERM: save, then end
    "logging_steps": "1",
    "dataloader_num_workers": "0",
    "disable_tqdm": "true",
    "report_to": "none",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("data", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--model", required=True)
    given, options = parser.parse_known_args()
    os.environ["ROOT_IMAGE_DIR"] = str(given.data)  # paths of images in the data are relative to it
    from swift.pipelines import sft_main

    find_image_tokens(given.model)
    label_answers()
    options += ["--model", given.model, *(word for name, value in OPTIONS.items() for word in (f"--{name}", value))]
    sft_main([*options, "--dataset", str(given.data / "train.jsonl"), "--output_dir", str(given.checkpoints)])
    if int(os.environ["RANK"]) == 0:
        copy_model(given.checkpoints, given.output)


def find_image_tokens(model: str) -> None:
    """Tell the template which tokens stand for images.

    ms-swift's code has the ids of Qwen's vocabulary. With another one it leaves one token for each image where there
    should be several, and the model's features of one sample's image go to the samples behind it: no error, and a model
    that does not see.
    """
    from swift.template.templates.qwen import Qwen2VLTemplate
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = config.image_token_id, config.video_token_id


def label_answers() -> None:
    """Leave the line end behind an answer out of the labels: it belongs to the turn that follows."""
    from swift.template import TEMPLATE_MAPPING

    template = TEMPLATE_MAPPING[OPTIONS["template"]]
    template.system_prefix = ["<|im_start|>system\n{{SYSTEM}}<|im_end|>"]
    template.prompt = ["\n<|im_start|>user\n{{QUERY}}<|im_end|>\n<|im_start|>assistant\n"]
    template.chat_sep = template.suffix = ["<|im_end|>"]


def copy_model(checkpoints: Path, output: Path) -> None:
    states = [
        json.loads(path.read_text(encoding="utf-8")) | {"in": path.parent}
        for path in checkpoints.glob("*/trainer_state.json")
    ]
    newest = max(states, key=lambda state: state["global_step"])
    if newest["global_step"] < newest["max_steps"]:
        sys.exit(STOPPED)
    shutil.copytree(newest["in"], output, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*OF_TRAINING))


if __name__ == "__main__":
    main()
