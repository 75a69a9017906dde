"""A second copy of checkpoints, to resume from when the first store is lost."""
