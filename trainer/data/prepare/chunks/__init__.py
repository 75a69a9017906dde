"""Data preparation in chunks, which are reused."""
