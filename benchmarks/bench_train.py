"""What the training step gains or costs: cached features, packing, our loop beside Hugging Face's and a plain one,
compiled layers, strategies beside ddp, training features beside none. `make bench-train`"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "Training step",
    [
        Part(
            "loops",
            "training.loops.comparison",
            150,
            "cached and online steps; our loop, Hugging Face's Trainer, a plain loop",
        ),
        Part("layouts", "training.layouts", 50, "packed and padded batches; attention by sample and under a mask"),
        Part("split", "training.step_split", 90, "what a step spends CPU time on; its rate beside its products alone"),
        Part(
            "nanovlm",
            "training.nanovlm",
            240,
            "beside nanoVLM's model and optimizer, from a checkout in build/nanovlm",
            default=False,
        ),
        Part(
            "shared-prefix",
            "training.prefixes.comparison",
            180,
            "questions about images, each image computed once and with each question",
            default=False,
        ),
        Part(
            "shared-pairs",
            "training.prefixes.pairs",
            180,
            "preference pairs, each prompt computed once and with each answer",
            default=False,
        ),
        Part(
            "shared-prefix-accuracy",
            "training.prefixes.accuracy",
            720,
            "answers after steps with one, some or all questions about an image; three seeds, two sets",
            default=False,
        ),
        Part("attention", "training.attention", 45, "one layer, by sample and under a mask", default=False),
        Part("compiled", "training.compiled_steps", 70, "train.compile beside eager layers"),
        Part(
            "checkpointing",
            "training.checkpointing",
            40,
            "full and selective checkpointing of small layers beside none",
            default=False,
        ),
        Part(
            "telemetry",
            "training.telemetry",
            40,
            "clocks of layers and reports of ranks, as a share of a step",
            default=False,
        ),
        Part("families", "training.families", 40, "family hf beside the family by hand", default=False),
        Part(
            "relevance",
            "training.relevance",
            60,
            "textures beside decoding; a step beside its forward passes",
            default=False,
        ),
        Part(
            "preferences",
            "training.preferences",
            40,
            "a DPO step beside its passes, and beside cross-entropy",
            default=False,
        ),
        Part("strategies", "training.strategies.comparison", 120, "every strategy beside ddp; two and four processes"),
        Part(
            "features",
            "training.strategies.comparison",
            130,
            "EMA, checkpointing, compression beside none",
            default=False,
        ),
        Part(
            "precision",
            "training.strategies.comparison",
            60,
            "bf16 state, 8-bit moments, nf4 beside the settings before them",
        ),
        Part("state", "training.state", 60, "bytes a parameter held and sent, by strategy and precision"),
        Part("servers", "training.parameter_servers", 300, "parameter servers with a slow worker", default=False),
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
