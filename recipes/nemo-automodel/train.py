"""Fine-tune a vision-language model with NeMo AutoModel. torchrun starts it; run.yaml has its command.

Other arguments are settings of NeMo, beside those in train.yaml. NeMo leaves its Hugging Face model within the last
checkpoint: that is copied to the output folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

STOPPED = 75  # exit code of a run that was stopped early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True)
    given, settings = parser.parse_known_args()
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM

    config = parse_args_and_load_config(str(Path(__file__).with_name("train.yaml")), argv=settings)
    recipe = FinetuneRecipeForVLM(config)
    recipe.setup()
    recipe.run_train_validation_loop()
    if int(os.environ["RANK"]) == 0:
        checkpoints = Path(config.checkpoint.checkpoint_dir)
        models = sorted(checkpoints.glob("*/model/consolidated"), key=lambda path: path.stat().st_mtime)
        if not models:
            sys.exit(STOPPED)
        shutil.copytree(models[-1], given.output, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
