"""Fine-tune a vision-language model with LLaMA-Factory. torchrun starts it; run.yaml has its command.

What `llamafactory-cli train` does, with three differences: a template that labels answers as the model's chat template
has them, a loss that does not depend on the number of processes and micro-batches, and an end that a stop shows in.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from llamafactory.data.formatter import StringFormatter
from llamafactory.data.template import TEMPLATES
from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed


class Trainer(workflow.CustomSeq2SeqTrainer):
    """Divides by the label tokens of the whole step, which LLaMA-Factory's own does for models without images only."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.model_accepts_loss_kwargs = True


class Stop(TrainerCallback):
    """After SIGTERM LLaMA-Factory saves a checkpoint, and would continue to a model and exit code 0."""

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps:
            sys.exit(STOPPED)


def main() -> None:
    # LLaMA-Factory labels the line end behind an answer. Here it belongs to the turn that follows.
    TEMPLATES["qwen2_vl_answers"] = replace(
        TEMPLATES["qwen2_vl"],
        format_system=StringFormatter(slots=["<|im_start|>system\n{{content}}<|im_end|>"]),
        format_user=StringFormatter(slots=["\n<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n"]),
        format_assistant=StringFormatter(slots=["{{content}}<|im_end|>"]),
    )
    workflow.CustomSeq2SeqTrainer = Trainer
    run_exp(callbacks=[Stop()])


if __name__ == "__main__":
    main()
