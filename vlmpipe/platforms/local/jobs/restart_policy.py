"""Restart budget of a failed job on Vertex AI: pure arithmetic, without processes or a clock.

Sources, under cloud.google.com/vertex-ai/docs/training: understanding-training-service for restarts and retries,
use-spot-vms for reclaimed machines; and the API's Scheduling message for the two switches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.platforms.step_context import FAULTS_VARIABLE, RETRIES_VARIABLE
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import custom_job as api


@dataclass(frozen=True)
class RestartPolicy:
    """How often replicas and the job are restarted. All zero: the first failure ends the job.

    worker_restarts: "up to five times" for each worker that fails in a way that is not permanent, in the same machine
        and with the same host name. A retry of the job resets their count.
    job_retries: "up to three times" when a worker's restarts are used up.
    spot_restarts: a job whose Spot machine is reclaimed is restarted "up to six times".
    whole_job: all replicas are restarted when one is (Scheduling.restart_job_on_worker_restart).
    """

    worker_restarts: int = 0
    job_retries: int = 0
    spot_restarts: int = 0
    whole_job: bool = False

    @property
    def restarts(self) -> bool:
        """Return whether anything is ever restarted."""
        return bool(self.worker_restarts or self.job_retries or self.spot_restarts)


PLATFORM = RestartPolicy(worker_restarts=5, job_retries=3, spot_restarts=6)


def restart_policy(scheduling: api.Scheduling, environment: Mapping[str, str] = os.environ) -> RestartPolicy:
    """The policy of a local job: none unless the run asks for one.

    VLMPIPE_LOCAL_RETRIES is a number of restarts for each replica and for reclaimed ones; under faults without a number
    the platform's own budget holds. disable_retries switches retries of the job off and with them
    restart_job_on_worker_restart, which it overrides (API: Scheduling.disable_retries).
    """
    asked = environment.get(RETRIES_VARIABLE, "")
    if asked:
        if not asked.isdigit():
            raise ConfigError(f"{RETRIES_VARIABLE} is {asked!r}", expected="a whole number of restarts, 0 or more")
        policy = RestartPolicy(worker_restarts=int(asked), spot_restarts=int(asked))
    else:
        policy = PLATFORM if environment.get(FAULTS_VARIABLE) else RestartPolicy()
    if scheduling.disable_retries:
        return RestartPolicy(worker_restarts=policy.worker_restarts)
    return RestartPolicy(
        policy.worker_restarts, policy.job_retries, policy.spot_restarts, scheduling.restart_job_on_worker_restart
    )


@dataclass(frozen=True)
class Restart:
    """A restart that the budget grants. Empty `replicas`: all of them, the whole job."""

    replicas: tuple[str, ...]
    budget: str  # such as "restart 2 of 5"
    reclaimed: bool = False

    @property
    def whole_job(self) -> bool:
        return not self.replicas


class Budget:
    """The restarts that are left of a policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._restarts: Counter[str] = Counter()  # by replica, since the last retry of the job
        self._retries = self._spot = 0

    def spend(self, fallen: Sequence[str], *, reclaimed: bool = False) -> Restart | None:
        """The restart after these replicas failed, the cause first, or None when the budget is spent.

        When the whole job restarts, only the cause is charged: the others failed because they lost it. Neither is
        charged for a `reclaimed` machine: its job restarts when Spot capacity returns.
        """
        policy = self.policy
        if reclaimed:
            if self._spot == policy.spot_restarts:
                return None
            self._spot += 1
            return Restart((), f"restart {self._spot} of {policy.spot_restarts} after reclaims", True)
        charged = fallen[:1] if policy.whole_job else fallen
        if all(self._restarts[name] < policy.worker_restarts for name in charged):
            self._restarts.update(charged)
            text = f"restart {max(self._restarts[name] for name in charged)} of {policy.worker_restarts}"
            return Restart(() if policy.whole_job else tuple(fallen), text)
        if self._retries < policy.job_retries:
            self._retries += 1
            self._restarts.clear()
            return Restart((), f"retry {self._retries} of {policy.job_retries} of the job")
        return None
