"""Time that checkpoints take: what holds training up, what a background thread writes meanwhile, and what a resume
reads."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.optimizer_step import LINK_BYTES_PER_S
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes, resumed_bytes
from vlmpipe.trainer.sizing.export_size import published_bytes

# Bytes a second that one rank writes, uploads and commits; the ranks of a node do so side by side. A resume is taken to
# read and verify at the rate of one rank on each node. Read: 419 MB in 0.66-1.39 s by torch.distributed.checkpoint on
# one rank; 148.8 s for a 7B model at IBM, which is 0.56 GB/s in all if it was weights and moments.
SAVE_BYTES_PER_S = 0.5e9
SIDE_BY_SIDE = 4  # ranks of a node that are taken to add up; with more, bucket and processors are shared. Assumed


@dataclass(frozen=True)
class SaveTime:
    """Seconds of one checkpoint."""

    blocks_s: float  # training waits: for the copy to the machine's memory, or for all of it
    writes_s: float  # from the copy to COMMIT; a failure meanwhile goes back to the checkpoint before
    reads_s: float = 0.0  # by each node, when training resumes: the model's published weights, then the checkpoint

    def in_a_step(self, step_s: float, every_steps: int) -> float:
        """A step's share of a checkpoint each `every_steps` steps of `step_s`: what blocks, and what is not written
        by the next save, which waits for it."""
        return (self.blocks_s + max(0.0, self.writes_s - every_steps * step_s)) / every_steps


def save_time(case: Scenario) -> SaveTime:
    """Time of one checkpoint of the training job, or the measured time in the run file."""
    config, layout = case.config, case.layout
    saved_bytes = checkpoint_bytes(case.shape.trainable_parameters, config.train)
    writes_s = saved_bytes / layout.nodes / node_bytes_per_s(case)
    read_bytes = resumed_bytes(case.shape.trainable_parameters, config.train, nodes=layout.nodes)
    reads_s = (published_bytes(config.model, case.shape) + read_bytes) / SAVE_BYTES_PER_S
    if config.plan.checkpoint_save_s:
        return SaveTime(config.plan.checkpoint_save_s, 0.0, reads_s)
    if not config.checkpoint.async_save:
        return SaveTime(writes_s, 0.0, reads_s)
    blocks_s = saved_bytes / (layout.optimizer_shards * layout.model_ranks) / LINK_BYTES_PER_S
    return SaveTime(blocks_s, writes_s, reads_s)


def node_bytes_per_s(case: Scenario) -> float:
    """Bytes a second that a node writes: DeepSpeed's first rank alone writes weights that all ranks hold."""
    alone = case.layout.strategy in ("zero1", "zero2")
    return SAVE_BYTES_PER_S * (1 if alone else min(SIDE_BY_SIDE, case.layout.ranks_per_node))


def save_sentences(case: Scenario, save: SaveTime) -> list[str]:
    """Assumptions of `save_time`."""
    if case.config.plan.checkpoint_save_s:
        return [f"A checkpoint holds training up for {save.blocks_s:.0f} s (plan.checkpoint_save_s)."]
    rate = f"a node is taken to save {node_bytes_per_s(case) / 1e9:g} GB/s"
    if not save.writes_s:
        return [f"A checkpoint holds training up for {save.blocks_s:.0f} s: {rate}."]
    return [
        f"A checkpoint holds training up for {save.blocks_s:.1f} s, the copy to the machine's memory at "
        f"{LINK_BYTES_PER_S / 1e9:g} GB/s a GPU; {save.writes_s:.0f} s of writing go on in the background: {rate}. Set "
        "plan.checkpoint_save_s to what a run of yours measured."
    ]
