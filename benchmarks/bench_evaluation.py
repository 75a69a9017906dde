"""What answering and scoring cost, and how often the gate accepts. `make bench-evaluation`"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "Evaluation",
    [
        Part("gate", "evaluation.gate", 180, "how often the gate accepts equal, better and worse models, simulated"),
        Part("baseline", "evaluation.baseline", 240, "how often bounds on gain and forgetting accept, simulated"),
        Part("compare", "evaluation.compare", 240, "how often a comparison tells equal models apart, simulated"),
        Part("sweeps", "evaluation.sweeps", 120, "how often a sweep tells equal and better variants apart, simulated"),
        Part(
            "slices", "evaluation.slices", 60, "how often equal and lower values of a field are told apart, simulated"
        ),
        Part("curve", "evaluation.curve", 90, "how often a learning curve's interval holds the truth, simulated"),
        Part(
            "curve-sets",
            "evaluation.curve_sets",
            1500,
            "whether it holds the hidden share of built-in sets",
            default=False,
        ),
        Part(
            "replay",
            "evaluation.replay",
            1800,
            "what digits forget of easy-vqa, without and with replay",
            default=False,
        ),
        Part(
            "audit-faults",
            "evaluation.audit_faults",
            900,
            "planted copies and wrong labels of three sets that data audit names",
            default=False,
        ),
        Part(
            "shared-questions",
            "evaluation.shared_questions",
            120,
            "answers to questions about the same images, which are computed once",
        ),
        Part("answers", "evaluation.answers", 120, "batch prediction beside the evaluation; the share of scoring"),
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
