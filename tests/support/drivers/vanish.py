"""Two nodes, of which the second one vanishes as a machine without power does: it is stopped, its sockets stay open.

torchrun ... -m tests.support.drivers.vanish
"""

from __future__ import annotations

import os
import signal
import time

from vlmpipe.trainer.distributed import heartbeats
from vlmpipe.trainer.distributed.agreement import meet
from vlmpipe.trainer.distributed.process import run_worker, start_worker


def main() -> int:
    heartbeats.INTERVAL_S, heartbeats.SILENT_S = 0.2, 2.0
    worker = start_worker()
    meet(worker)
    if worker.rank == 1:
        heartbeats.now_doing("saving step 7")
        time.sleep(1.0)  # a beat with these words
        os.kill(os.getpid(), signal.SIGSTOP)
    meet(worker)  # six hours, without signs of life
    return 0


if __name__ == "__main__":
    run_worker(main)
