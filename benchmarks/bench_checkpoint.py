"""What saving costs: the stall of a save, the overhead of a run, transfer and resume; and what damage does to
checkpoints. `make bench-checkpoint`, `make duel`

Real strategy, real commit protocol, one process. Uploads go to a folder, or to the strict stand-in for Cloud Storage on
this machine: they show what our side costs, and nothing about a network.
"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "Checkpoints",
    [
        Part("stall", "checkpoint.save", 60, "how long a save holds training up, in the background and waiting"),
        Part("overhead", "checkpoint.save", 140, "a run that saves every 100 steps, beside one that never does"),
        Part("mirror", "checkpoint.save", 90, "a run whose checkpoints are mirrored, beside one without a mirror"),
        Part("resume", "checkpoint.resume", 80, "find, verify and load a checkpoint of 1,000 files, make a step"),
        Part("transfer", "checkpoint.transfer", 110, "to a folder, a bucket and a mirror, beside plain copies"),
        Part("checkpoint-ranks", "scale.checkpoint_ranks", 60, "requests of saves and resumes of up to 1,024 ranks"),
        Part("damage", "checkpoint.damage", 60, "damaged files of torch, safetensors, DCP, DeepSpeed: who notices"),
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
