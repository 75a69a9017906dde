"""Build the strategies of run files and print the most bytes that the first rank held meanwhile, as JSON.

torchrun ... -m tests.support.drivers.weigh_start --configs runs/a/run.json runs/b/run.json
"""

from __future__ import annotations

import argparse
import gc
import json

from tests.support.trainer.measure_memory import Scales
from trainer.config.compiling import CompileChoice
from trainer.config.job import JobConfig
from trainer.distributed.data_parallel_rank import replica_of
from trainer.distributed.process import run_worker, start_worker
from trainer.models.registry import family_of
from trainer.setup import build_model, build_strategy, open_data

MARK = "weighed: "
UNCOMPILED = CompileChoice("off", "nothing is trained")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    worker = start_worker()
    found = {}
    for config in parser.parse_args().configs:
        job = JobConfig.load(config)
        family, data = family_of(job.model), open_data(job)
        with Scales() as scales:
            built = build_model(job, family, data, replica_of(job.train, worker))
            strategy, _ = build_strategy(job, family, data, built, worker, UNCOMPILED)
        found[job.run.run_id] = {"peak": scales.peak_bytes, "parameters": built.num_parameters}
        del built, strategy
        gc.collect()
    if worker.is_first:
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
