"""Newest checkpoint of a run, in a folder or a bucket."""

from __future__ import annotations

from vlmpipe.trainer.storage.base import Storage


def newest_checkpoint_step(store: Storage) -> int | None:
    """Optimizer steps in the newest committed checkpoint of a run that was not given up; None without any."""
    # `status` needs these modules, and the run file's sections, for nothing else.
    from vlmpipe.trainer.checkpoint.attempts import order_of
    from vlmpipe.trainer.checkpoint.commit import committed
    from vlmpipe.trainer.external.checkpoints.states import states_of

    # Our trainer's, and those of a program of the user's own.
    names = [*committed(store), *committed(states_of(store.root_uri))]
    newest = max(map(order_of, names), default=(-1, -1, ""))
    return newest[1] if newest[0] >= 0 else None
