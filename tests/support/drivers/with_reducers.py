"""Trains runs in one process group, each in a job with reducers that some ranks are connected to while it trains.

Nodes have one process each. The connections are this driver's own, where those of NCCL's plugin would be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.loop import train

NODES = ("127.0.0.1:2222", "127.0.0.2:2222")


def cluster_spec(rank: int, reducers: list[str]) -> str:
    """CLUSTER_SPEC as Vertex AI gives it to the node of this rank."""
    pools = {"workerpool0": [NODES[0]], "workerpool1": [NODES[1]], **({"workerpool2": reducers} if reducers else {})}
    task = {"type": f"workerpool{rank}", "index": 0, "trial": ""}
    return json.dumps({"cluster": pools, "environment": "cloud", "task": task, "job": {}})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", required=True, help="JSON: config, reducers and connected ranks of each")
    worker, stop = start_worker(), StopRequest()
    for run in json.loads(parser.parse_args().runs):
        os.environ["CLUSTER_SPEC"] = cluster_spec(worker.rank, run["reducers"])
        with contextlib.ExitStack() as held:
            if worker.rank in run["connected"]:
                for reducer in run["reducers"]:
                    host, _, port = reducer.rpartition(":")
                    held.enter_context(socket.create_connection((host, int(port))))
            code = train(JobConfig.load(run["config"]), worker, stop)
        if code:
            return code
    return 0


if __name__ == "__main__":
    run_worker(main)
