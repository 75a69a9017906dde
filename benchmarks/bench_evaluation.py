"""What answering costs: batch prediction beside the evaluation, and scoring. `make bench-evaluation`"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "Evaluation",
    [Part("answers", "evaluation.answers", 120, "batch prediction beside the evaluation; the share of scoring")],
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
