"""Check whether the reducers that a job pays for can be reached, once its nodes have met.

Their port is documented nowhere (trainer/distributed/reduction_server.py). So an address that answers, even by refusing
the connection, counts as reached; a reducer whose name is not known to this node does not exist for NCCL either.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from vlmpipe.trainer.errors import ExitCode, UserError, print_warning
from vlmpipe.trainer.threads import thread_pool

CONNECT_S = 5.0
RETRY_S = 5.0
NO_ANSWER_S = 60.0  # for addresses whose names are known: a port that drops packets never answers, and GPUs wait
UNKNOWN_NAME = "unknown name"
Reach = Callable[[str], str]


def reach(address: str, connect_s: float = CONNECT_S) -> str:
    """Reason why this node does not reach "host:port": "" for an answer, else "unknown name" or the error's words."""
    host, _, port = address.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return UNKNOWN_NAME
    reason = ""
    for *_, where in addresses:
        try:
            socket.create_connection((str(where[0]), int(where[1])), timeout=connect_s).close()
        except ConnectionRefusedError:
            return ""
        except OSError as error:
            reason = str(error)
        else:
            return ""
    return reason


def require_reducers(
    reducers: Sequence[str],
    *,
    timeout_s: float,
    fails: bool,
    reach: Reach = reach,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Return when all reducers answer. One that does not in time is a warning: its port may be closed on purpose.

    Args:
        reducers: "host:port" of each, as CLUSTER_SPEC has them. They start minutes apart.
        timeout_s: for their names to be known; for an answer then NO_ANSWER_S.
        fails: raise where a name is still unknown at the end, and do not warn.

    Raises UserError (78).
    """
    until_s, missing = now() + timeout_s, _missing(reducers, reach)
    named_s = now()  # when the last reducer was without a name
    while missing and now() < until_s:  # looking takes time, too: CONNECT_S for each that does not answer
        if UNKNOWN_NAME in missing.values():
            named_s = now()
        elif now() >= named_s + NO_ANSWER_S:
            break
        sleep(RETRY_S)
        missing = _missing(list(missing), reach)
    unknown = [address for address, why in missing.items() if why == UNKNOWN_NAME]
    if unknown and fails:
        raise UserError(
            f"{len(unknown)} of {len(reducers)} reducers are not there: the name of {unknown[0]} is unknown",
            expected=f"{len(reducers)} reducers, which are paid for, within {timeout_s:g} s",
            fix="look at the logs of worker pool 2 (its image, its quota), or run without reducers "
            "(cluster.reduction_server: null)",
            code=ExitCode.MACHINE,
        )
    for address, why in missing.items():
        print_warning(f"the reducer {address} does not answer: {why}", step="preflight")


def _missing(reducers: Sequence[str], reach: Reach) -> dict[str, str]:
    with thread_pool(16, name="reducers") as pool:
        answers = zip(reducers, pool.map(reach, reducers), strict=True)
        return {address: why for address, why in answers if why}
