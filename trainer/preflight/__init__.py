"""Checks before a job's work: of the node, of the machine that its spec buys, and of room for checkpoints."""
