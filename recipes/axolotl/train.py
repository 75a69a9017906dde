"""Fine-tune a vision-language model with axolotl. torchrun starts it; run.yaml has its command.

Words of the form key=value are settings of axolotl, beside those in train.yaml.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    from axolotl.cli.train import do_cli

    config = Path(__file__).resolve().with_name("train.yaml")
    os.chdir(given.data)  # paths of images in the data are relative to it
    dataset = {"path": str(given.data / "train.jsonl"), "ds_type": "json", "split": "train", "type": "chat_template"}
    do_cli(config, datasets=[dataset], **dict(setting.split("=", 1) for setting in given.settings))


if __name__ == "__main__":
    main()
