"""Data preparation: reads and validates samples and writes them as indexed shards."""
