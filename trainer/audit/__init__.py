"""Data audit: what prepared data, its features and the checkpoints of a run say about single samples."""
