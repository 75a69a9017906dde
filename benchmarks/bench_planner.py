"""What the planner says, beside what is measured here: memory, FLOPs, step times, the rate of an update in memory; and
what the commands cost before they do any work. `make bench-planner`

All on the CPU. It checks what is counted and the proportions of time, not the speed of a GPU.
"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "The planner, predicted and measured",
    [
        Part("memory", "planner.memory", 240, "bytes of real processes, as many of 300 cases as the time allows"),
        Part("flops", "planner.flops", 60, "of models of every kind, beside torch's counter"),
        Part("steps", "planner.step_times", 90, "step times, predicted from one calibrating step"),
        Part("host-update", "planner.host_update", 20, "the rate of an update in the machine's memory"),
        Part("search", "planner.search", 60, "CPU time of --suggest over up to 4,096 GPUs, with its budget"),
        Part(
            "compiling", "planner.compiling", 40, "what compiling all shipped run files takes, by step", default=False
        ),
        Part(
            "many-runs",
            "planner.many_runs",
            360,
            "commands about runs with 100 to 10,000 runs under one folder",
            default=False,
        ),
        Part("commands", "planner.commands", 130, "CPU time of help, check, plan, compile and submit"),
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
