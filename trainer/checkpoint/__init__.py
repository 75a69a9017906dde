"""Checkpoints that exist when their COMMIT does."""
